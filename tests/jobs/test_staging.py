"""What a job takes along: user modules, declared data, files that a config names; nothing else."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import SMALL, refusal
from test_submit import server

from raydpfl import Experiment
from raydpfl.config.overrides import value_at
from raydpfl.experiment import overridden
from raydpfl.jobs import packaging
from raydpfl.sweep import Sweep

CLIP = "from raydpfl.methods.bounding import Clip\nclass Own(Clip):\n    pass\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that commands are run in; what is imported from it is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        source = getattr(sys.modules[name], "__file__", None) or str(tmp_path)
        if source.startswith(str(tmp_path)):
            del sys.modules[name]


def packed(tree: dict, here: Path, *overrides: str, there: bool = False) -> tuple:
    """The config that is sent in the place of this one, and the files."""
    tree = overridden(tree, overrides)
    return packaging.pack(tree, [Experiment.from_dict(tree)], here, files_on_cluster=there)


def sent(here: Path, kind: str = "pkg.deep.mine:Own") -> set[str]:
    return set(packed(SMALL, here, f"bounding.kind={kind}", "bounding.bound=1")[1])


def package(here: Path, init: bool = True) -> None:
    for folder in ("pkg", "pkg/deep", "pkg/.git", "pkg/__pycache__", "pkg/.hidden", "pkg/big"):
        (here / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("pkg", "pkg/deep"):
        if init:
            (here / folder / "__init__.py").touch()
    (here / "pkg/deep/mine.py").write_text(CLIP)
    (here / "pkg/unused.py").touch()
    (here / "pkg/types.pyi").touch()
    (here / f"pkg/fast{packaging.EXTENSION_SUFFIXES[0]}").touch()
    hidden = (".env", ".git/config", ".hidden/a.py", "__pycache__/a.pyc")
    for name in (*hidden, "secret.json", "big/b.bin"):
        (here / "pkg" / name).write_text("SECRET")
    (here / "pkg/link.py").symlink_to("/etc/passwd")
    (here / "pkg/away").symlink_to("/etc")
    (here / "other.py").touch()


@pytest.mark.parametrize("init", [True, False])
def test_a_package_is_sent_as_its_modules_with_or_without_an_init(init, here):
    package(here, init)
    own = {"pkg/deep/mine.py", "pkg/unused.py", "pkg/types.pyi"}
    own |= {f"pkg/fast{packaging.EXTENSION_SUFFIXES[0]}"}
    assert sent(here) == own | ({"pkg/__init__.py", "pkg/deep/__init__.py"} if init else set())


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (
            '"pkg.deep" = ["a.txt"]\n"pkg" = ["c", "deep/b.txt", ".env"]',
            {"deep/a.txt", "deep/b.txt", "c"},
        ),
        ('"*" = ["*.txt"]', {"deep/a.txt", "deep/b.txt", "deep/d.txt"}),
    ],
)
def test_declared_data_are_sent(declared, expected, here):
    package(here)
    for name in ("deep/a.txt", "deep/b.txt", "deep/d.txt", "c"):
        (here / "pkg" / name).touch()
    (here / "pyproject.toml").write_text(f"[tool.setuptools.package-data]\n{declared}\n")
    data = {name for name in sent(here) if not name.endswith(packaging.CODE)}
    assert data == {f"pkg/{name}" for name in expected}


def test_what_is_imported_but_not_sent_is_refused_before_anything_is_sent(here):
    (here / "away").mkdir()
    (here / "away/mine.py").write_text(CLIP)
    (here / "linked.py").symlink_to(here / "away/mine.py")
    with refusal("submit = 'linked.py': expected modules that are no links"):
        sent(here, "linked:Own")


@pytest.mark.parametrize(
    ("limit", "size", "said"),
    [
        ("LIMIT", 2 * 10**9, r"huge.bin': .*at most 100 MB .* 2,000 MB"),
        ("COUNT", 0, "^submit = 'pkg': expected at most 3 files"),
    ],
)
def test_too_much_is_refused_by_its_name_and_the_limit_before_it_is_copied(
    limit, size, said, here, monkeypatch
):
    package(here)
    (here / "pyproject.toml").write_text('[tool.setuptools.package-data]\npkg = ["big/*"]\n')
    with open(here / "pkg/big/huge.bin", "wb") as file:
        file.truncate(size)
    monkeypatch.setattr(packaging.shutil, "copyfile", lambda *a, **k: pytest.fail("it was copied"))
    if limit == "COUNT":
        monkeypatch.setattr(packaging, "COUNT", 3)
    tree = overridden(SMALL, ["bounding.kind=pkg.deep.mine:Own", "bounding.bound=1"])
    (here / "c.yaml").write_text(yaml.safe_dump(tree))
    with refusal(said):
        server().submit("c.yaml")


def named(here: Path) -> dict[str, dict]:
    """Config sections by the file that each names."""
    np.savez(here / "t.npz", x=np.zeros((40, 4)), y=np.arange(40) % 2)
    np.savez(here / "w.npz", p=np.ones(50), e=np.ones(50))
    (here / "own.py").write_text(
        "from raydpfl.data import InMemoryData\nclass Mine(InMemoryData):\n    where: str\n"
        "    def samples(self, seed, root): return self.where\n"
    )
    table = {"kind": "table", "train": "t.npz", "x": ["x"], "y": "y", "clients": 5}
    pca = {"kind": "pca", "file": "w.npz"}
    resnet = {"kind": "resnet18", "weights": "w.npz"}
    importance = {"kind": "importance", "cohort": 5, "path": "w.npz", "column": "p"}
    epsilon = {"kind": "column", "path": "w.npz", "column": "e"}
    step = {"bounding": {"kind": "per_sample_clip", "bound": 1.0}}
    return {
        "data.train": {"data": table},
        "data.test": {"data": table | {"train": "t.npz", "test": "t.npz"}},
        "data.features.file": {"data": SMALL["data"] | {"features": pca}},
        "data.features.weights": {"data": SMALL["data"] | {"features": resnet}},
        "selection.path": {"selection": importance},
        "noise.epsilon.path": {"noise": {"kind": "gaussian", "epsilon": epsilon}, **step},
        "data.where": {"data": {"kind": "own:Mine", "where": "w.npz", "clients": 3}},
        "model.args.path": {"model": {"kind": "torch.nn:Linear", "args": {"path": "w.npz"}}},
    }


FIELDS = ["data.train", "data.test", "data.features.file", "data.features.weights"]
FIELDS += ["selection.path", "noise.epsilon.path", "data.where", "model.args.path"]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_every_file_that_a_config_names_goes_along_under_a_name_of_its_contents(
    field, absolute, here
):
    tree = SMALL | named(here)[field]
    name = "t.npz" if "train" in field or "test" in field else "w.npz"
    if absolute:
        text = yaml.safe_dump(tree).replace(f" {name}", f" {here / name}")
        tree = yaml.safe_load(text)
    new, files = packed(tree, here)
    place = value_at(new, field)
    assert place.startswith("files/") and place.endswith(name)
    packaging.copy(files, here / "stage")
    assert (here / "stage" / place).read_bytes() == (here / name).read_bytes()
    assert not [each for each in packed(tree, here, there=True)[1] if "npz" in each]


def test_a_folder_that_a_config_names_goes_along_with_its_files(here):
    for name in ("cat/1.png", "dog/2.png", ".hidden/3.png"):
        (here / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "images" / name).write_bytes(name.encode())
    tree = SMALL | {"data": {"kind": "image_folder", "train": "images", "clients": 2}}
    new, files = packed(tree, here)
    folder = new["data"]["train"]
    assert folder.startswith("files/") and folder.endswith("/images")
    assert set(files) == {f"{folder}/cat/1.png", f"{folder}/dog/2.png"}
    (here / "images" / "cat" / "1.png").write_bytes(b"another")
    assert packed(tree, here)[0] != new


def test_files_in_search_spaces_go_along(here):
    tree = SMALL | named(here)["data.train"] | {"sweep": {}}
    np.savez(here / "u.npz", x=np.zeros((30, 4)), y=np.arange(30) % 2)
    tree["data"] = tree["data"] | {"train": {"grid": ["t.npz", "u.npz"]}}
    (here / "s.yaml").write_text(yaml.safe_dump(tree))
    asked = packaging.read("s.yaml")
    new, files = packaging.pack(asked.tree, asked.experiments, here)
    assert asked.command == "sweep" and len(files) == 2
    assert sorted(new["data"]["train"]["grid"]) == sorted(files)
    assert Sweep.from_dict(new).size == 2


@pytest.mark.slow
def test_a_file_that_cannot_be_sent_is_refused_in_one_line(here, monkeypatch):
    tree = SMALL | named(here)["data.train"]
    (here / "link.npz").symlink_to(here / "t.npz")
    (here / ".hidden").mkdir()
    (here / ".hidden/t.npz").write_bytes(b"")
    for name, said in {
        "missing.npz": "a file or folder that is here, to be sent; or --there",
        "link.npz": "a regular file or folder, no link",
        ".hidden/t.npz": "a file that is not hidden",
    }.items():
        with refusal(f"^data.train = '{name}': expected {said}"):
            packed(tree, here, f"data.train={name}")
    monkeypatch.setattr(packaging, "LIMIT", 100)
    with refusal(r"t\.npz': expected at most 0 MB .* say --there"):
        packed(tree, here)
