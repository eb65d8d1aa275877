"""Who runs a call, and why not the others: pure functions of the facts, so all of it is tested without a GPU."""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kda
import kda.cuda
from kda import dispatch
from kda.numerics import EXPONENT_BITS, exponent_margin
from kda.problem import Facts, GateKind, Missing, Problem

#: The main job on a Hopper GPU: what every implementation accepts.
SM90 = Facts(
    device="cuda",
    capability=(9, 0),
    rocm=False,
    triton_interpreter=False,
    B=1,
    T=1000,
    H=4,
    HV=8,
    K=128,
    V=128,
    N=3,
    varlen=True,
    dtype=torch.bfloat16,
    g_dtype=torch.bfloat16,
    beta_dtype=torch.bfloat16,
    A_log_dtype=torch.float32,
    dt_bias_dtype=torch.float32,
    state_dtype=torch.float32,
    gate=GateKind.BOUNDED,
    lower_bound=-5.0,
    initial_state=True,
    final_state=True,
    use_qk_l2norm=True,
    use_beta_sigmoid=True,
    allow_neg_eigval=False,
    batch_invariant=False,
    unaligned=(),
    requires_grad=(),
)
CPU = replace(SM90, device="cpu", capability=None)
NAMES = tuple(dispatch.TABLE)


def plant(monkeypatch, name: str, **changes) -> None:
    """Change fields of an implementation's IMPL for one test."""
    module = importlib.import_module(dispatch.TABLE[name])
    monkeypatch.setattr(module, "IMPL", replace(module.IMPL, **changes))


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch):
    """Every implementation is available, and nothing is remembered from another test."""
    for name in NAMES:
        plant(monkeypatch, name, unavailable=lambda: None)
    dispatch.forget()
    dispatch._log_once.cache_clear()
    yield
    dispatch.forget()
    dispatch._log_once.cache_clear()


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the implementations that ran, in order."""
    names: list[str] = []

    def spy(name, real):
        def fwd(problem: Problem) -> kda.Output:
            names.append(name)
            return real(problem)

        return fwd

    for name in NAMES:
        plant(monkeypatch, name, fwd=spy(name, dispatch.implementation(name).fwd))
    return names


def call(T: int = 3, dtype: torch.dtype = torch.float32, **changes) -> dict:
    """A small call on the CPU."""
    q = torch.ones(1, T, 1, 4, dtype=dtype)
    return {"q": q, "k": q, "v": q, "g": q, "beta": q[..., 0], "lower_bound": -5.0, **changes}


def sentence(text: str) -> bool:
    """Words, and a period at the end."""
    return text.endswith(".") and len(text.split()) >= 3 and "\n" not in text


# What each implementation accepts.

ACCEPTED = {
    "the main job": ({}, NAMES),
    "beta fp32": ({"beta_dtype": torch.float32}, NAMES),
    "bound 0": ({"lower_bound": 0.0}, NAMES),
    "no heads, no tokens": ({"B": 0, "T": 0, "N": 0, "H": 0, "HV": 0}, NAMES),
    "no states": ({"initial_state": False, "final_state": False}, NAMES),
    "bf16 state": ({"state_dtype": torch.bfloat16}, NAMES),
    "a batch": ({"varlen": False, "B": 3}, NAMES),
    "no bias": ({"A_log_dtype": None, "dt_bias_dtype": None}, NAMES),
    "unaligned": ({"unaligned": ("q", "out")}, NAMES),
    "A100": ({"capability": (8, 0)}, NAMES[1:]),
    "L40": ({"capability": (8, 9)}, NAMES[1:]),
    "Blackwell": ({"capability": (10, 0)}, NAMES[1:]),
    "MI300": ({"rocm": True, "capability": (9, 4)}, NAMES[1:]),
    "MI300 that reports Hopper's number": ({"rocm": True}, NAMES[1:]),
    "fp16": ({"dtype": torch.float16}, NAMES[1:]),
    "fp32": ({"dtype": torch.float32}, NAMES[1:]),
    "g fp32": ({"g_dtype": torch.float32}, NAMES[1:]),
    "beta fp16": ({"beta_dtype": torch.float16}, NAMES[1:]),
    "K 64": ({"K": 64}, NAMES[1:]),
    "V 64": ({"V": 64}, NAMES[1:]),
    "K and V 256": ({"K": 256, "V": 256}, NAMES[1:]),
    "K and V 1": ({"K": 1, "V": 1}, NAMES[1:]),
    "softplus gate": ({"gate": GateKind.SOFTPLUS, "lower_bound": None}, NAMES[1:]),
    "given gate": ({"gate": GateKind.GIVEN, "lower_bound": None}, NAMES[1:]),
    "bound -6": ({"lower_bound": -6.0}, NAMES[1:]),
    "bound -1e6": ({"lower_bound": -1e6}, NAMES[1:]),
    "SM75": ({"capability": (7, 5)}, NAMES[2:]),
    "fp64": ({"dtype": torch.float64}, NAMES[2:]),
    "K 257": ({"K": 257}, NAMES[2:]),
    "V 257": ({"V": 257}, NAMES[2:]),
    "gradients": ({"requires_grad": ("q", "A_log")}, NAMES[2:]),
    "CPU": ({"device": "cpu", "capability": None}, NAMES[2:]),
    "CPU, interpreter": ({"device": "cpu", "capability": None, "triton_interpreter": True}, NAMES[1:]),
    "macOS": ({"device": "mps", "capability": None}, NAMES[2:]),
}


@pytest.mark.parametrize(("changes", "names"), ACCEPTED.values(), ids=ACCEPTED)
def test_who_accepts(changes, names):
    reasons = dispatch.explain_facts(replace(SM90, **changes)).reasons
    assert tuple(name for name in NAMES if not reasons[name]) == names


#: implementation, the one fact that is wrong, and what the one reason says of it.
REFUSED = [
    ("cuda", {"capability": (8, 0)}, ("compute capability 8.0", "9.0")),
    ("cuda", {"capability": (10, 0)}, ("compute capability 10.0", "9.0")),
    ("cuda", {"capability": (7, 5)}, ("compute capability 7.5", "9.0")),
    ("triton", {"capability": (7, 5)}, ("compute capability 7.5", "8.0")),
    ("cuda", {"rocm": True}, ("ROCm", "NVIDIA Hopper")),
    ("cuda", {"device": "mps", "capability": None}, ("mps", "NVIDIA Hopper")),
    ("triton", {"device": "mps", "capability": None}, ("mps", "CUDA")),
    ("cuda", {"device": "cpu", "capability": None}, ("cpu", "NVIDIA Hopper")),
    ("triton", {"device": "cpu", "capability": None}, ("cpu", "CUDA")),
    ("cuda", {"device": "cpu", "capability": None, "rocm": True}, ("cpu", "NVIDIA Hopper")),
    ("triton", {"device": "mps", "capability": None, "triton_interpreter": True}, ("mps", "CUDA")),
    ("cuda", {"dtype": torch.float16}, ("q is float16", "bfloat16")),
    ("cuda", {"dtype": torch.float64}, ("q is float64", "bfloat16")),
    ("triton", {"dtype": torch.float64}, ("q is float64", "bfloat16, float16 and float32")),
    ("cuda", {"g_dtype": torch.float32}, ("g is float32", "bfloat16")),
    ("cuda", {"beta_dtype": torch.float16}, ("beta is float16", "bfloat16 or float32")),
    ("cuda", {"beta_dtype": torch.float64}, ("beta is float64", "bfloat16 or float32")),
    ("cuda", {"K": 64}, ("K is 64", "128")),
    ("cuda", {"V": 256}, ("V is 256", "128")),
    ("triton", {"K": 257}, ("K is 257", "256")),
    ("triton", {"V": 300}, ("V is 300", "256")),
    ("cuda", {"gate": GateKind.SOFTPLUS, "lower_bound": None}, ("softplus", "lower_bound")),
    ("cuda", {"gate": GateKind.GIVEN, "lower_bound": None}, ("given", "lower_bound")),
    ("cuda", {"lower_bound": -6.0}, ("lower_bound is -6", "-5")),
    ("cuda", {"requires_grad": ("q", "A_log")}, ("q, A_log", "backward")),
    ("triton", {"requires_grad": ("beta",)}, ("beta", "backward")),
]


@pytest.mark.parametrize("name, changes, parts", REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_reason_names_the_fact(name, changes, parts):
    (reason,) = dispatch.explain_facts(replace(SM90, **changes)).reasons[name]
    assert sentence(reason)
    assert all(part in reason for part in parts), reason


def test_every_reason_is_told_at_once():
    facts = replace(CPU, dtype=torch.float64, K=300, V=7, requires_grad=("v",), gate=GateKind.GIVEN, lower_bound=None)
    reasons = dispatch.explain_facts(facts).reasons
    assert {name: len(listed) for name, listed in reasons.items()} == {
        "cuda": 6,
        "triton": 4,
        "chunked": 0,
        "recurrent": 0,
    }
    assert all(sentence(reason) for listed in reasons.values() for reason in listed)


def test_exponent_budget():
    """cuda's declared budget decides, on both sides of its edge; the contract fixes -5 inside and -6 outside."""
    per_nat = EXPONENT_BITS - exponent_margin(kda.numerics.SM90_TOKENS, -1.0)
    edge = -(EXPONENT_BITS - kda.cuda.OPERAND_BITS) / per_nat
    accepts = {
        bound: not dispatch.implementation("cuda").reasons(replace(SM90, lower_bound=bound))
        for bound in (0.0, -5.0, edge * (1 - 1e-9), edge * (1 + 1e-9), -5.1, -6.0)
    }
    assert list(accepts.values()) == [True, True, True, False, False, False], accepts


def test_reasons_are_pure(monkeypatch):
    def boom(*args, **kwargs):
        raise AssertionError("a device query")

    queries = ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties")
    for query in (*queries, "get_device_name", "init", "_lazy_init", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, query, boom)
    for changes, _ in ACCEPTED.values():
        facts = replace(SM90, **changes)
        for name in NAMES:
            impl = dispatch.implementation(name)
            first = (impl.reasons(facts), impl.notes(facts))
            assert (impl.reasons(replace(facts)), impl.notes(replace(facts))) == first
        dispatch.explain_facts(facts)


def test_facts_are_a_value():
    assert hash(SM90) == hash(replace(SM90))
    assert "bfloat16" in repr(SM90)
    assert "tensor(" not in repr(kda.api.gather(**call())[0].facts)


# What `auto` and a name come to.


def test_auto_takes_cuda_where_everything_is_right():
    explanation = dispatch.explain_facts(SM90)
    assert explanation.chosen == "cuda"
    assert explanation.auto == ("cuda", "triton")
    lines = dict(zip(NAMES, str(explanation).splitlines(), strict=True))
    assert "chosen" in lines["cuda"]
    assert "could run; cuda comes first" in lines["triton"]
    assert all("could run; only by name" in lines[name] for name in ("chunked", "recurrent"))
    assert dispatch.choose(SM90).name == "cuda"


def test_auto_takes_triton_while_cuda_is_not_built(monkeypatch):
    plant(monkeypatch, "cuda", unavailable=lambda: "not built yet.")
    explanation = dispatch.explain_facts(SM90)
    assert explanation.chosen == "triton"
    assert explanation.reasons["cuda"] == ("not built yet.",)
    assert "not built yet." in str(explanation)
    assert dispatch.choose(SM90).name == "triton"


CHOICES = [
    (SM90, "cuda"),
    (replace(SM90, capability=(8, 0)), "triton"),
    (replace(SM90, capability=(10, 0)), "triton"),
    (replace(SM90, rocm=True), "triton"),
    (replace(SM90, lower_bound=-6.0), "triton"),
    (replace(SM90, K=64), "triton"),
    (replace(SM90, capability=(7, 5)), None),
    (replace(SM90, dtype=torch.float64), None),
    (replace(SM90, K=257), None),
    (replace(SM90, requires_grad=("q",)), None),
    (replace(SM90, device="mps", capability=None), None),
    (replace(SM90, device="meta", capability=None), None),
    (CPU, "chunked"),
    (replace(CPU, triton_interpreter=True), "chunked"),
    (replace(CPU, dtype=torch.float64, K=999, requires_grad=("q",)), "chunked"),
]


@pytest.mark.parametrize(("facts", "chosen"), CHOICES)
def test_auto(facts, chosen):
    """What can run in plain PyTorch alone is refused with the way out; on a CPU there is always `chunked`."""
    explanation = dispatch.explain_facts(facts)
    assert explanation.chosen == chosen
    if chosen is not None:
        assert dispatch.choose(facts).name == chosen
        return
    with pytest.raises(kda.Unsupported) as caught:
        dispatch.choose(facts)
    assert isinstance(caught.value, NotImplementedError)
    assert "impl='chunked'" in str(caught.value)
    assert f"auto takes {' or '.join(explanation.auto) or 'nothing'}" in str(caught.value)
    assert caught.value.reasons == {name: listed for name, listed in explanation.reasons.items() if listed}
    assert {"cuda", "triton"} <= set(caught.value.reasons)
    for name, listed in caught.value.reasons.items():
        assert all(f"{name}: {reason}" in str(caught.value) for reason in listed)


@pytest.mark.parametrize("facts", [SM90, CPU, replace(SM90, dtype=torch.float64)], ids=["SM90", "CPU", "fp64"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_strict(name, facts):
    explanation = dispatch.explain_facts(facts, name)
    if not explanation.reasons[name]:
        assert explanation.chosen == name
        assert dispatch.choose(facts, name).name == name
        return
    assert explanation.chosen is None
    with pytest.raises(kda.Unsupported) as caught:
        dispatch.choose(facts, name)
    assert f"impl={name!r}" in str(caught.value)
    assert all(reason in str(caught.value) for reason in explanation.reasons[name])


def test_the_text_of_an_explanation():
    facts = replace(CPU, unaligned=("q",))
    for impl in ("auto", *NAMES):
        lines = str(dispatch.explain_facts(facts, impl)).splitlines()
        assert [line.split()[0] for line in lines] == list(NAMES)
        chosen = [line.split()[0] for line in lines if line.split()[1] == "chosen."]
        assert chosen == [name for name in NAMES if name == dispatch.explain_facts(facts, impl).chosen]


def test_a_name_is_not_called_the_faster_one():
    """`recurrent` was asked for; it is not faster than `chunked`."""
    assert "faster" not in str(dispatch.explain_facts(CPU, "recurrent"))


def test_notes_are_told_with_the_choice(monkeypatch):
    plant(monkeypatch, "chunked", notes=lambda facts: [f"copies {name}." for name in facts.unaligned])
    explanation = dispatch.explain_facts(replace(CPU, unaligned=("q",)))
    assert explanation.notes["chunked"] == ("copies q.",)
    assert "copies q." in str(explanation)


def test_an_exception_in_a_support_check_is_no_reason(monkeypatch):
    def boom(facts: Facts) -> list[str]:
        raise AttributeError("a typo")

    for name in NAMES:
        with monkeypatch.context() as patch:
            plant(patch, name, reasons=boom)
            dispatch.forget()
            with pytest.raises(AttributeError, match="a typo"):
                dispatch.explain_facts(SM90)
            with pytest.raises(AttributeError, match="a typo"):
                dispatch.choose(SM90, name)


def test_an_exception_in_an_availability_check_is_no_reason(monkeypatch):
    def boom() -> str | None:
        raise OSError("a broken cache")

    plant(monkeypatch, "cuda", unavailable=boom)
    with pytest.raises(OSError, match="a broken cache"):
        dispatch.choose(SM90)


def test_an_exception_while_running_is_not_followed_by_another_implementation(monkeypatch, ran):
    def boom(problem: Problem) -> kda.Output:
        raise RuntimeError("a kernel failed")

    plant(monkeypatch, "chunked", fwd=boom)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        kda.fwd(**call())
    assert ran == []


def test_forget_drops_what_was_remembered(monkeypatch):
    plant(monkeypatch, "cuda", unavailable=lambda: "not built yet.")
    assert dispatch.choose(SM90).name == "triton"
    plant(monkeypatch, "cuda", unavailable=lambda: None)
    dispatch.forget()
    assert dispatch.choose(SM90).name == "cuda"


def test_a_repeated_call_asks_nothing_again(monkeypatch):
    asked: list[Facts] = []
    plant(monkeypatch, "chunked", reasons=lambda facts: asked.append(facts) or [])
    for _ in range(3):
        kda.fwd(**call())
    assert len(asked) == 1


# What has to be built first.


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """`cuda` is not built, and a build makes it available; what was asked for, in order."""
    asked: list[str] = []

    def build(**options: bool) -> Path:
        asked.append("built")
        return Path("library")

    monkeypatch.delenv("KDA_NO_JIT", raising=False)
    plant(monkeypatch, "cuda", unavailable=lambda: None if asked else "not built yet.", build=build)
    dispatch.forget()
    return asked


def test_auto_builds_nothing(builds):
    assert dispatch.choose(SM90).name == "triton"
    assert dispatch.explain_facts(SM90, "cuda").chosen is None
    assert builds == []


def test_a_name_is_built_at_its_first_use_and_auto_takes_it_then(builds):
    for _ in range(3):
        assert dispatch.choose(SM90, "cuda").name == "cuda"
    assert dispatch.choose(SM90).name == "cuda"
    assert dispatch.explain_facts(SM90).chosen == "cuda"
    assert builds == ["built"]


@pytest.mark.parametrize("facts", [CPU, replace(SM90, K=64)], ids=["CPU", "K 64"])
def test_nothing_is_built_for_a_call_that_it_cannot_run(builds, facts):
    with pytest.raises(kda.Unsupported) as caught:
        dispatch.choose(facts, "cuda")
    assert "not built yet." in caught.value.reasons["cuda"]
    assert builds == []


@pytest.mark.parametrize(("value", "forbidden"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_switch_against_building_at_first_use(builds, monkeypatch, value, forbidden):
    monkeypatch.setenv("KDA_NO_JIT", value)
    if not forbidden:
        assert dispatch.choose(SM90, "cuda").name == "cuda"
        return
    with pytest.raises(kda.Unsupported, match="impl='cuda' cannot run this call; triton, chunked") as caught:
        dispatch.choose(SM90, "cuda")
    not_built, switch = caught.value.reasons["cuda"]
    assert not_built == "not built yet."
    assert "KDA_NO_JIT" in switch
    assert sentence(switch)
    assert builds == []
    assert kda.build() == Path("library"), "asked for in so many words"
    assert dispatch.choose(SM90, "cuda").name == "cuda"


def test_a_missing_piece_is_the_reason(builds, monkeypatch):
    def build(**options: bool) -> Path:
        raise Missing("nvcc was not found; install it.")

    plant(monkeypatch, "cuda", build=build)
    with pytest.raises(kda.Unsupported) as caught:
        dispatch.choose(SM90, "cuda")
    assert caught.value.reasons["cuda"] == ("nvcc was not found; install it.",)
    with pytest.raises(Missing, match="nvcc"):
        kda.build()


def test_a_build_that_fails_is_no_reason(builds, monkeypatch):
    def build(**options: bool) -> Path:
        raise RuntimeError("a kernel spills")

    plant(monkeypatch, "cuda", build=build)
    with pytest.raises(RuntimeError, match="a kernel spills") as caught:
        dispatch.choose(SM90, "cuda")
    assert not isinstance(caught.value, kda.Unsupported)


def test_only_what_has_something_to_build_is_built(monkeypatch):
    with pytest.raises(RuntimeError, match="chunked has nothing to build"):
        dispatch.build("chunked")
    plant(monkeypatch, "triton", unavailable=lambda: "not installed.")
    with pytest.raises(kda.Unsupported, match="not installed"):
        dispatch.choose(SM90, "triton")


# The public calls.


def test_auto_on_a_cpu_runs_chunked(ran):
    kda.fwd(**call())
    assert ran == ["chunked"]


@pytest.mark.parametrize("name", ["chunked", "recurrent"])
def test_the_name_runs(ran, name):
    kda.fwd(**call(), impl=name)
    assert ran == [name]


def test_nothing_runs_in_place_of_a_name(ran):
    for arguments in (call(impl="cuda"), call(impl="triton", dtype=torch.float64)):
        with pytest.raises(kda.Unsupported):
            kda.fwd(**arguments)
    assert ran == []


def test_gradients_are_a_fact_of_the_call(ran):
    arguments = call(A_log=torch.zeros(1, requires_grad=True))
    assert "A_log" in " ".join(kda.explain(**arguments).reasons["triton"])
    with torch.no_grad():
        assert "A_log" not in " ".join(kda.explain(**arguments).reasons["triton"])
    with pytest.raises(kda.Unsupported, match="A_log requires grad"):
        kda.fwd(**arguments, impl="triton")
    kda.fwd(**arguments)
    assert ran == ["chunked"]


def test_explain_runs_nothing(ran):
    assert kda.explain(**call()).chosen == "chunked"
    assert kda.explain(**call(impl="recurrent")).chosen == "recurrent"
    assert kda.explain(**call(impl="cuda")).chosen is None
    positional = list(call().values())[:5]
    assert kda.explain(*positional, lower_bound=-5.0).chosen == "chunked"
    assert ran == []


def test_explain_writes_nothing():
    out, state = torch.full((1, 3, 1, 4), 7.0), torch.full((1, 1, 4, 4), 7.0)
    kda.explain(**call(), out=out, final_state=state)
    assert bool((out == 7).all())
    assert bool((state == 7).all())


def test_explain_has_the_signature_of_fwd():
    assert inspect.signature(kda.explain) == inspect.signature(kda.fwd)
    parameters = inspect.signature(kda.fwd).parameters
    positional = [name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    flash_kda = "q k v g beta scale out A_log dt_bias lower_bound initial_state final_state cu_seqlens"
    assert " ".join(positional) == flash_kda
    assert {p.kind for name, p in parameters.items() if name not in positional} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_faster_one_that_is_not_built_is_named_once(monkeypatch, caplog):
    """`auto` goes on with the next best and says so; not where a call could not run there anyway, nor by name."""
    plant(monkeypatch, "cuda", unavailable=lambda: "not built yet.", build=pytest.fail)
    for _ in range(2):
        assert dispatch.choose(SM90).name == "triton"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cuda would run this call, but: not built yet. Until then auto takes the next best." in caplog.text
    caplog.clear()
    dispatch.forget()
    assert dispatch.choose(replace(SM90, K=64)).name == "triton"
    assert dispatch.choose(SM90, "triton").name == "triton"
    assert not caplog.records


def test_the_log_says_once_per_kind_of_call_what_ran(caplog):
    caplog.set_level(logging.INFO, "kda")
    for T in (3, 3, 5):
        kda.fwd(**call(T))
    assert [(r.name, r.levelname) for r in caplog.records] == [("kda", "INFO")]
    assert "chunked" in caplog.text
    kda.fwd(**call(dtype=torch.bfloat16))
    kda.fwd(**call(), impl="recurrent")
    kda.explain(**call(dtype=torch.float16))
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split()[0] for message in messages] == ["chunked", "chunked", "recurrent"]


def test_implementations(monkeypatch):
    plant(monkeypatch, "cuda", unavailable=lambda: "the compiler is missing.")
    rows = kda.implementations()
    assert [row.name for row in rows] == list(NAMES) == ["cuda", "triton", "chunked", "recurrent"]
    assert [row.available for row in rows] == [False, True, True, True]
    assert [row.reason for row in rows] == ["the compiler is missing.", None, None, None]
    assert all(row.summary for row in rows)


def test_what_is_missing_here_is_a_sentence(monkeypatch):
    monkeypatch.undo()  # the real state of this machine
    for row in kda.implementations():
        assert row.available == (row.reason is None)
        assert row.available or sentence(row.reason), row


@pytest.mark.parametrize("name", NAMES)
def test_an_implementation_is_called_what_the_table_says(name):
    impl = dispatch.implementation(name)
    assert impl.name == name
    assert impl.rounding(SM90).output == torch.finfo(torch.bfloat16).eps / 2
