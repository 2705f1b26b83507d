"""The rules of this repository that no linter knows: who may import whom, and who may name a subject."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "codec", "kernels", "kv", "loadgen", "pipeline", "stages", "tidemill")
# Whom a package may import, by module name (a package stands for all in it). docs/architecture.md draws the same.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "kernels": (),
    "codec": (),
    "pipeline": (),
    "kv": ("kernels",),
    "stages": ("pipeline", "codec", "kv", "kernels"),
    "loadgen": ("pipeline", "kv", "stages.balance"),
    "tidemill": ("pipeline", "codec", "kv", "kernels", "stages", "loadgen"),
    "bench": ("pipeline", "codec", "kv", "kernels", "stages", "loadgen", "tidemill"),
}
SUBJECT = re.compile(r"(?<![\w./-])v1\.[a-z{*>]")
MAY_NAME_SUBJECTS = ("topics.yaml", "README.md", "docs/", "tests/")
SOURCE_SUFFIXES = {".py", ".toml", ".yaml", ".yml", ".json", ".conf", ".md", ".sh", ""}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    """Full names of what a module imports: `from stages import balance` gives stages.balance."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)


def our_imports(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path.read_text(encoding="utf-8")):
        top = name.partition(".")[0]
        if top in (*PACKAGES, "tests") and top != package:
            yield name


def allowed(package: str, name: str) -> bool:
    return any(name == target or name.startswith(f"{target}.") for target in ALLOWED[package])


def source_files() -> Iterator[Path]:
    top_level = (path for path in ROOT.iterdir() if path.is_file())
    folders = (ROOT / folder for folder in (*PACKAGES, "deploy", "docs", "tests", ".ci"))
    nested = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    for path in (*top_level, *nested):
        if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts:
            yield path


def test_packages_import_only_in_the_allowed_directions():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        for name in our_imports(path)
        if not allowed(path.relative_to(ROOT).parts[0], name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_packages_import_each_other():
    graph: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for path in modules():
        graph[path.relative_to(ROOT).parts[0]] |= {name.partition(".")[0] for name in our_imports(path)}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_only_topics_yaml_the_docs_and_tests_name_a_subject():
    named = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in source_files()
        if not path.relative_to(ROOT).as_posix().startswith(MAY_NAME_SUBJECTS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if SUBJECT.search(line)
    ]
    assert not named, "\n".join(named)


def test_the_official_recipe_is_imported_in_exactly_one_file():
    users = [
        path.relative_to(ROOT).as_posix()
        for path in modules()
        if any(name.partition(".")[0] == "deepseek_recipe" for name in imports(path.read_text(encoding="utf-8")))
    ]
    assert len(users) == 1, users
    assert users[0].startswith("codec/")


def test_every_package_of_the_checkout_is_in_the_wheel():
    wheel = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    missing = [name for name in PACKAGES if f'"{name}" = "tidemill/_app/{name}"' not in wheel]
    assert missing == ["bench", "tidemill"]  # benches stay in the checkout, the launcher is the package itself


@pytest.mark.parametrize(
    ("package", "name", "may"),
    [
        ("pipeline", "kv.index", False),
        ("kv", "kernels.hash", True),
        ("kv", "pipeline.events.Plan", False),
        ("loadgen", "stages.balance.choose", True),
        ("loadgen", "stages.balanced", False),
        ("loadgen", "stages.engine", False),
        ("stages", "tidemill.up", False),
        ("tidemill", "bench.hops", False),
    ],
)
def test_the_rule_itself(package: str, name: str, may: bool):
    assert allowed(package, name) is may


def test_imports_inside_functions_and_of_submodules_are_seen():
    source = "def f():\n    import kv.plan\n    from stages import balance as b\n"
    assert list(imports(source)) == ["kv.plan", "stages.balance"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('publish("v1.lookup", body)', True),
        ('f"v1.prefill.{worker}"', True),
        ("subject v1.*.default", True),
        ('f"v1.{topic}"', True),
        ('"/v1/chat/completions"', False),
        ("DeepSeek-V4.1 v1.0 conv1.weight", False),
        ("schema-v1.json", False),
    ],
)
def test_what_counts_as_naming_a_subject(line: str, names: bool):
    assert (SUBJECT.search(line) is not None) is names
