"""in_memory.py, each case in a process of its own, since what is imported already matters."""

from pathlib import Path

import pytest
from patch_tools import (
    HEADER,
    PATCHED,
    STOCK,
    contents,
    lines,
    python,
    stock_megatrons,
    unified,
    write,
)

from megatron_stability import extras
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.patch_set import load_patch_set
from megatron_stability.megatron.patching.tree import read_tree
from tests.patches.small_megatron import small_megatron

INSTALL = """
import sys
from pathlib import Path
from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.in_memory import PatchFinder, install
patches = Path("../patches")
"""
REFUSED = """
try:
    install(patches=patches)
except UsageError as error:
    print(error)
assert not any(isinstance(f, PatchFinder) for f in sys.meta_path)
"""


def test_patched_modules_are_served_and_nothing_is_written(root, patches):
    stock = contents(root)
    out = python(
        INSTALL
        + """
installed = install(patches=patches)
import megatron.core.second, megatron.core.seam, megatron.training.third
from megatron.core import first
print(first.A, first.B, first.line_30, megatron.core.second.where(), megatron.core.seam.VALUE)
print(megatron.training.third.value, megatron.core.second.__file__ == str(Path("megatron/core/second.py").resolve()))
print(installed.on_disk, installed.digest)
""",
        root,
    )
    assert out.splitlines() == [
        "1 2 30 patched only in the diff",
        "still none True",
        f"False {load_patch_set('0.19.2', patches).digest}",
    ]
    assert contents(root) == stock
    targets = {Path(path).stem for path in PATCHED}
    assert {p.name.split(".")[0] for p in root.rglob("*.pyc")} & targets == set()


def test_tracebacks_and_getsource_show_the_patched_lines(root, patches):
    out = python(
        INSTALL
        + """
import inspect, linecache, traceback
install(patches=patches)
from megatron.core import second, seam
linecache.checkcache()
print(inspect.getsource(second.where), end="")
print(inspect.getsource(seam), end="")
try:
    second.fail()
except ValueError:
    print(traceback.format_exc().splitlines()[-2].strip())
""",
        root,
    )
    assert out == "def where():\n    return 'patched'\nVALUE = 'only in the diff'\nraise ValueError('here')\n"


def test_a_stale_bytecode_cache_of_the_stock_file_is_not_used(root, patches):
    assert python("from megatron.core.second import where; print(where())", root) == "stock\n"
    caches = {p: p.read_bytes() for p in root.rglob("second.*.pyc")}
    assert caches
    out = python(INSTALL + "install(patches=patches)\nfrom megatron.core.second import where; print(where())", root)
    assert out == "patched\n"
    assert {p: p.read_bytes() for p in root.rglob("second.*.pyc")} == caches


def test_reload_is_patched_and_uninstall_gives_stock_back(root, patches):
    out = python(
        INSTALL
        + """
import importlib, inspect
before = list(sys.meta_path)
installed = install(patches=patches)
from megatron.core import second
print(importlib.reload(second).where())
installed.uninstall()
installed.uninstall()
assert sys.meta_path == before
del sys.modules["megatron.core.second"]
second = importlib.import_module("megatron.core.second")
print(second.where(), "patched" in inspect.getsource(second))
""",
        root,
    )
    assert out == "patched\nstock False\n"


def test_an_imported_target_is_an_error(root, patches):
    out = python(INSTALL + "import megatron.core.second, megatron.training.third" + REFUSED, root)
    assert out.startswith(
        "The patches can't be applied in memory: megatron.core.second, megatron.training.third is imported"
    )


def test_patches_on_disk_are_left_to_the_disk(root, patches):
    on_disk.apply(root, patches)
    out = python(
        INSTALL
        + """
installed = install(patches=patches)
from megatron.core import second, seam
print(installed.on_disk, installed.digest, second.where(), type(second.__loader__).__name__)
installed.uninstall()
""",
        root,
    )
    assert out == f"True {load_patch_set('0.19.2', patches).digest} patched SourceFileLoader\n"


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        (
            "megatron/core/second.py",
            PATCHED["megatron/core/second.py"],
            "half-applied (megatron/core/second.py patched",
        ),
        ("megatron/core/second.py", STOCK["megatron/core/second.py"].replace("fail", "fall"), "does not fit"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(root, patches, path, text, said):
    write(root, {path: text})
    assert said in python(INSTALL + REFUSED, root)


def test_two_installations_are_an_error(root, patches):
    out = python(
        INSTALL + "install(patches=patches)\ntry: install(patches=patches)\nexcept UsageError as error: print(error)",
        root,
    )
    assert "installed in this process already" in out


@pytest.mark.parametrize("module", ["second", "seam"])
def test_an_import_from_another_tree_is_an_error(root, patches, tmp_path, module):
    write(tmp_path / "other", STOCK)
    out = python(
        INSTALL
        + f"""
install(patches=patches)
sys.path.insert(0, "../other")
try:
    import megatron.core.{module}
except UsageError as error:
    print(error)
""",
        root,
    )
    assert f"megatron.core.{module} would be imported from" in out
    assert "but the patches were made for" in out


def test_megatron_that_is_not_installed_is_one_sentence(tmp_path, patches):
    (tmp_path / "empty").mkdir()
    without_megatron = "sys.path[:] = [p for p in sys.path if p and not (Path(p) / 'megatron').exists()]"
    out = python(INSTALL + without_megatron + REFUSED, tmp_path / "empty")
    assert out.startswith(f"megatron-core is not installed in this environment: {extras.command('megatron')}")


def test_installing_imports_neither_megatron_nor_torch(root, patches):
    out = python(
        INSTALL + "install(patches=patches)\nprint(sorted({'torch', 'megatron.core'} & set(sys.modules)))", root
    )
    assert out == "[]\n"


def test_an_unknown_tree_is_served_by_anchor(tmp_path):
    root = small_megatron(tmp_path / "clone")
    stock = contents(root)
    out = python(
        INSTALL
        + """
installed = install()
from megatron.core.transformer import spec_utils
from megatron.core.stability import seams
print(installed.tree.said)
print(seams.__name__, spec_utils.seams is seams)
print(*spec_utils.import_module(("json", "dumps")).__all__[:1])
""",
        root,
    )
    said, module, name = out.splitlines()
    assert said == read_tree(root).said
    assert (module, name) == ("megatron_stability.megatron.seams True", "dump")
    assert contents(root) == stock


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.19.2", pytest.param("0.18.2", marks=pytest.mark.rare)])
def test_a_real_wheel_is_patched_in_memory(tmp_path, version):
    """On the module that holds ModuleSpec; the rest of megatron.core is imported as it is."""
    stock = stock_megatrons()[version]
    path = "megatron/core/transformer/spec_utils.py"
    text = (stock / path).read_text(encoding="utf-8")
    head = lines(text)
    at = head.index("@dataclass\n")
    new = "".join([*head[:at], "SEAM = __name__\n", *head[at:]])
    diffs = unified(path, text, new) + unified("megatron/core/seam.py", None, "import megatron_stability.errors\n")
    write(tmp_path, {f"patches/{version}/001-x.patch": HEADER + diffs})
    (tmp_path / "cwd").mkdir()
    out = python(
        INSTALL
        + f"""
import inspect
sys.dont_write_bytecode = True  # a shared wheel stays as it is
install(patches=patches)
from megatron.core.transformer import spec_utils
import megatron.core.seam
print(spec_utils.SEAM, Path(spec_utils.__file__) == Path({str(stock / path)!r}))
print("SEAM = __name__" in inspect.getsource(spec_utils), spec_utils.ModuleSpec.__module__)
""",
        tmp_path / "cwd",
        stock,
    )
    assert out.splitlines() == [
        "megatron.core.transformer.spec_utils True",
        "True megatron.core.transformer.spec_utils",
    ]
    assert (stock / path).read_text(encoding="utf-8") == text
