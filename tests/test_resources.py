"""What ptxas says of a kernel: the table, and what a build refuses."""

from __future__ import annotations

import shutil
import sys

import pytest

from kda.cuda import build, resources
from kda.cuda.resources import Resources

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux")

# What ptxas says: printed by nvcc 13.0.88 for kernels written to provoke it.

GOOD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3kda4sm905plainEPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda4sm905plainEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 6 barriers
ptxas info    : Compile time = 1.482 ms
ptxas info    : Function properties for _ZN3kda4sm906helperEff
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_ZN3kda4sm9010fwd_kernelILb1ELi128EEEvNS0_1PE' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda4sm9010fwd_kernelILb1ELi128EEEvNS0_1PE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 512 bytes smem
ptxas info    : Compile time = 4.184 ms
"""
SPILL = """\
ptxas warning : Local memory used for function '_ZN3kda4sm907spillerEPf', size of stack frame: 472 bytes
ptxas warning : Registers are spilled to local memory in function '_ZN3kda4sm907spillerEPf', 548 bytes spill stores, \
560 bytes spill loads
ptxas info    : Compiling entry function '_ZN3kda4sm907spillerEPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda4sm907spillerEPf
    472 bytes stack frame, 548 bytes spill stores, 560 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 472 bytes cumulative stack size
"""
STACK = """\
ptxas info    : Compiling entry function '_ZN3kda4sm905plainEPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda4sm905plainEPf
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 256 bytes cumulative stack size, 512 bytes smem
"""
OF_A_CALLEE = """\
ptxas info    : Compiling entry function '_ZN3kda4sm905plainEPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda4sm905plainEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers
ptxas info    : Function properties for _ZN3kda4sm906helperEff
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
SERIALISED = """\
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function '_ZN3kda4sm905plainEPf'
ptxas info    : Function properties for _ZN3kda4sm905plainEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
INJECTED = """\
ptxas info    : (C7517) warpgroup.wait is injected in around line 43 by compiler to allow use of registers defined by \
GMMA in function '_Z1kPfmm'
"""
IGNORED = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
"""

has_cxxfilt = pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")


@has_cxxfilt
def test_the_table_of_resources(tmp_path):
    rows = resources.parse(GOOD)
    assert rows == [
        Resources("sm90::plain", 10, 0, 0, 0, 0, 6),
        Resources("sm90::helper", 0, 0, 0, 0, 0, 0),
        Resources("sm90::fwd_kernel<true, 128>", 24, 0, 0, 0, 512, 1),
    ]
    resources.save(rows, tmp_path / "rows.json")
    assert resources.read(tmp_path / "rows.json") == rows
    assert resources.parse("") == []
    assert resources.objections(GOOD) == []


def test_without_a_demangler(monkeypatch):
    monkeypatch.setattr(resources.shutil, "which", lambda name: None)
    assert [row.kernel for row in resources.parse(STACK)] == ["_ZN3kda4sm905plainEPf"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void kda::sm90::fwd_kernel<true, 128>(kda::sm90::P)", "sm90::fwd_kernel<true, 128>"),
        ("void kda::f<(kda::Mode)1, (bool)0>(float*, int)", "f<(Mode)1, (bool)0>"),
        ("void kda::(anonymous namespace)::f<3>(int)", "f<3>"),
        ("plain(float*)", "plain"),
        ("_Zunknown", "_Zunknown"),
    ],
)
def test_short_names(name, expected):
    assert resources.short(name) == expected


REFUSED = {
    "spill": (SPILL, ["spiller: 472 bytes of stack frame", "548 bytes of spill stores", "560 bytes of spill loads"]),
    "stack frame": (STACK, ["plain: 256 bytes of stack frame"]),
    "stack frame of a callee": (OF_A_CALLEE, ["helper: 8 bytes of stack frame"]),
    "C7511": (SERIALISED, ["C7511", "serialized", "plain"]),
    "C7517": (INJECTED, ["C7517", "line 43"]),
    "C7508": (IGNORED, ["C7508", "setmaxnreg"]),
    **{f"C75{n}": (SERIALISED.replace("C7511", f"C75{n}"), [f"C75{n}"]) for n in range(10, 19)},
}


@has_cxxfilt
@pytest.mark.parametrize(("output", "parts"), REFUSED.values(), ids=REFUSED)
def test_a_kernel_that_takes_too_much_is_refused(machine, output, parts):
    assert resources.objections(output)
    machine.tell(output=output)
    with pytest.raises(build.BuildFailed) as caught:
        machine.build()
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "_Z" not in str(caught.value)
    assert machine.built() is None
    assert machine.left() == []
