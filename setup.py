"""The one thing that pyproject.toml cannot say: a wheel that carries the compiled Hopper kernels.

`KDA_WITH_BINARY=1 pip wheel . --no-deps --no-build-isolation` compiles them with what the environment has, or takes
them from the cache, and marks the wheel as one for this platform. Without the variable the wheel is pure and carries
the sources alone.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.absolute()
WITH_BINARY = os.environ.get("KDA_WITH_BINARY", "").lower() not in ("", "0", "false", "no", "off")


class BuildPy(build_py):
    def run(self) -> None:
        target = Path(self.build_lib) / "kda" / "cuda"
        if not self.editable_mode:
            # A source or a binary left by an earlier build would not fit the others.
            shutil.rmtree(target, ignore_errors=True)
        super().run()
        if WITH_BINARY and not self.editable_mode:
            copy_binary(target)


def copy_binary(target: Path) -> None:
    """Put the library and what is known of it into `target`/lib, and see that the package there accepts it."""
    sys.path.insert(0, str(ROOT))
    try:
        from kda.cuda import build
    except ImportError as error:
        raise SystemExit(
            f"KDA_WITH_BINARY=1: {error}. The kernels are compiled with this environment's torch, ninja and "
            "nvidia-cutlass: install them, and add --no-build-isolation."
        ) from error
    library = build.build()
    (target / "lib").mkdir()
    for name in (build.LIBRARY, build.MANIFEST, build.RESOURCES):
        shutil.copyfile(library.parent / name, target / "lib" / name)
    if build.packaged(target) is None:
        raise SystemExit(f"KDA_WITH_BINARY=1: the sources in {target} are not those that {library} was built of.")


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not WITH_BINARY

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        # Opened with ctypes: any Python, but one kind of machine.
        return ("py3", "none", platform) if WITH_BINARY else (python, abi, platform)


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
