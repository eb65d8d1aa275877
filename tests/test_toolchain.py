"""nvcc, CUTLASS, ninja, a C++ compiler: which one is taken, and what is said where there is none."""

from __future__ import annotations

import sys

import pytest
from machines import headers, release, script, sentence

from kda.cuda import build, toolchain
from kda.problem import Missing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux")


def test_nvcc_is_that_of_cuda_home_then_of_the_path_then_of_the_installer(bare, monkeypatch, tmp_path):
    usual = script(tmp_path / "cuda" / "bin" / "nvcc")
    assert toolchain.find_nvcc() == usual
    on_path = script(bare / "nvcc")
    assert toolchain.find_nvcc() == on_path
    home = script(tmp_path / "toolkit" / "bin" / "nvcc").parents[1]
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolchain.find_nvcc() == home / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", "")
    assert toolchain.find_nvcc() == on_path


def test_a_wrong_setting_is_not_passed_over(bare, monkeypatch, tmp_path):
    script(bare / "nvcc")
    script(bare / "g++")
    for name, search in {
        "CUDA_HOME": toolchain.find_nvcc,
        "CUTLASS_HOME": toolchain.find_cutlass,
        "NVCC_CCBIN": toolchain.find_cxx,
    }.items():
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
        with pytest.raises(Missing) as caught:
            search()
        assert sentence(str(caught.value))
        assert f"{name} is {tmp_path / 'nowhere'}" in str(caught.value)


def test_cutlass_is_a_checkout_an_include_directory_or_the_wheel(bare, monkeypatch, tmp_path):
    include = headers(tmp_path / "checkout" / "include")
    for home in (include.parent, include):
        monkeypatch.setenv("CUTLASS_HOME", str(home))
        assert toolchain.find_cutlass() == include
    monkeypatch.delenv("CUTLASS_HOME")
    wheel = tmp_path / "site" / "cutlass_library"
    inside = headers(wheel / "source" / "include")
    script(wheel / "__init__.py", "raise ImportError('this must not be imported')")
    monkeypatch.undo()
    monkeypatch.delenv("CUTLASS_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "cutlass_library", raising=False)
    assert toolchain.find_cutlass() == inside
    assert "cutlass_library" not in sys.modules


def test_ninja_of_the_environment_comes_before_that_of_the_path(bare, tmp_path):
    on_path = script(bare / "ninja")
    assert toolchain.find_ninja() == on_path
    installed = script(tmp_path / "scripts" / "ninja")
    assert toolchain.find_ninja() == installed


def test_the_compiler_may_be_named_or_lie_in_a_directory(bare, monkeypatch, tmp_path):
    other = script(tmp_path / "gcc" / "g++")
    script(bare / "clang++")
    for value, found in {str(other): other, str(other.parent): other, "clang++": bare / "clang++"}.items():
        monkeypatch.setenv("NVCC_CCBIN", value)
        assert toolchain.find_cxx() == found


def test_every_missing_piece_is_a_sentence_that_tells_what_to_do(bare, monkeypatch, tmp_path):
    texts = []
    for search in (toolchain.find_nvcc, toolchain.find_cutlass, toolchain.find_ninja, toolchain.find_cxx):
        with pytest.raises(Missing, match=r"not found.*install") as caught:
            search()
        texts.append(str(caught.value))
    assert all(map(sentence, texts))
    with pytest.raises(Missing) as caught:
        toolchain.find()
    assert str(caught.value) == " ".join(texts)
    monkeypatch.setenv("KDA_CACHE", str(tmp_path / "none"))
    assert build.unavailable() == " ".join(texts)
    for part in ("CUDA_HOME", "CUTLASS_HOME", "nvidia-cutlass", "pip install ninja", "NVCC_CCBIN"):
        assert part in " ".join(texts)


def test_another_system(monkeypatch):
    monkeypatch.setattr(toolchain.sys, "platform", "darwin")
    with pytest.raises(Missing, match="built on Linux; this is darwin"):
        toolchain.find()


def test_versions(machine):
    pieces = toolchain.find()
    assert toolchain.versions(pieces) == toolchain.Versions("13.0.88", "4.2.0", "")


@pytest.mark.parametrize("text", [release("11.8"), "nonsense", ""])
def test_an_nvcc_that_will_not_do(machine, text):
    machine.tell(version=text)
    with pytest.raises(Missing, match="need 12.0 or newer" if "release" in text else "says no release") as caught:
        machine.build()
    assert sentence(str(caught.value))
