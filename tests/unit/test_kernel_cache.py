"""A change in any source that is compiled leads to a new directory of compiled kernels."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate_lab
from tidegate.kernels import cache

LAB_KERNELS = sorted(Path(tidegate_lab.__path__[0]).rglob("*_kernel.py"))
NOT_COMPILED = [cache.PACKAGE / "errors.py", cache.PACKAGE / "kernels" / "cache.py"]


def imports_of(source: Path) -> Iterator[Path]:
    """Returns the modules of the product that a source imports."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tidegate":
            module = cache.PACKAGE.joinpath(*node.module.split(".")[1:])
            for name in node.names:
                inner = module / f"{name.name}.py"
                yield inner if inner.exists() else module.with_suffix(".py")


@pytest.mark.parametrize("source", [*LAB_KERNELS, *cache.law_sources()], ids=lambda source: source.stem)
def test_what_the_laboratory_compiles_of_the_product_is_listed(source: Path) -> None:
    assert set(imports_of(source)) <= {*cache.law_sources(), *NOT_COMPILED}


def test_a_changed_law_is_compiled_again_and_leaves_saved_arrays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cache.PACKAGE, tmp_path / "tidegate")
    compiled, saved = cache.cache_version(), cache.kernel_version()
    monkeypatch.setattr(cache, "PACKAGE", tmp_path / "tidegate")
    assert (cache.cache_version(), cache.kernel_version()) == (compiled, saved)
    for law in cache.law_sources():
        before = cache.cache_version()
        law.write_text(law.read_text() + "# changed\n")
        assert (cache.cache_version() != before, cache.kernel_version()) == (True, saved), law
    cache.kernel_sources()[0].write_text("# changed\n")
    assert cache.kernel_version() != saved
