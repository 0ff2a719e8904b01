from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

import loadtests.all
from loadtests import single_file
from loadtests.harness import command, machine
from loadtests.harness.command import Options
from loadtests.harness.content import load_object
from loadtests.harness.intervals import mean_of
from loadtests.harness.report import Report, Verdict, at_most

DIRECTORY = Path(loadtests.all.__file__).parent


def those_there_are() -> set[str]:
    """Modules of `loadtests` that define `test`."""
    found = set()
    for path in DIRECTORY.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "test" for node in tree.body):
            found.add(path.stem)
    return found


def test_every_load_test_is_among_all() -> None:
    """A load test that is written is one that `loadtests.all` runs."""
    assert set(loadtests.all.TESTS) == those_there_are()


@pytest.mark.parametrize("name", sorted(loadtests.all.TESTS))
def test_each_can_be_run_alone_and_says_how(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m loadtests.NAME --help` works and shows the command and its options."""
    monkeypatch.setattr(sys, "argv", ["loadtests", "--help"])
    monkeypatch.delitem(sys.modules, f"loadtests.{name}", raising=False)
    monkeypatch.setattr(machine, "prepare_client", lambda: None)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"loadtests.{name}", run_name="__main__")
    said = capsys.readouterr().out
    assert f"python -m loadtests.{name} " in said
    assert "--record" in said


def test_records_are_appended_with_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second record goes behind the first, under its date and machine; the picture is the latest one."""
    monkeypatch.setattr(command, "_DIRECTORY", tmp_path)
    for value in (1.0, 2.0):
        report = Report("small", "Small", "command", verdicts=[Verdict("CPU", mean_of([value]), at_most(3))])
        command.begin_record()
        command.keep(report)
    results = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert results.index("| CPU | 1 (one round") < results.index("| CPU | 2 (one round")
    assert results.count("\n## ") == 2
    assert results.count("![Small](results/small.svg)") == 2
    assert ">2</text>" in (tmp_path / "results" / "small.svg").read_text(encoding="utf-8")


def test_a_scaled_run_says_its_scale() -> None:
    """The command in a record repeats the run; counts shrink with the scale, down to their least."""
    options = Options(2, 3, 0.25)
    assert options.command("epochs") == "python -m loadtests.epochs --seconds 2 --rounds 3 --scale 0.25"
    assert (options.of(100), options.of(100, least=50)) == (25, 50)


def test_the_window_slides_over_the_whole_file() -> None:
    """Reads stay in the file, reach both ends, keep near their window, and differ from epoch to epoch."""
    of = load_object("/load/one", 2_000_000_000)
    reads = single_file.epoch(of, 1)
    window = single_file.WINDOW_BYTES
    assert all(first >= 0 and first + (length or 0) <= of.size_bytes for _, first, length in reads)
    assert min(first for _, first, _ in reads) < window
    assert max(first for _, first, _ in reads) > of.size_bytes - window
    for at, (_, first, _) in enumerate(reads):
        assert abs(first - at / len(reads) * (of.size_bytes - window)) <= window
    assert reads != single_file.epoch(of, 2)
    assert reads == single_file.epoch(of, 1)
