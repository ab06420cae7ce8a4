"""Runs from Python: progress in the cell of a notebook, and a result that shows itself."""

import re
import subprocess
import sys
from html import unescape
from types import SimpleNamespace

import pytest
from conftest import experiment, refusal
from matplotlib.figure import Figure

from raydpfl import Result, run
from raydpfl.cli import notebook
from raydpfl.runtime import runner

ASKED = {
    "noise": {"kind": "gaussian", "epsilon": 6.0, "delta": 1e-5},
    "privacy": {"accountants": ["rdp", "paper"]},
}


@pytest.fixture
def cell(monkeypatch):
    """What a cell shows in the end, of an IPython that is running."""
    looks = []

    class Handle:
        update = looks.append

    def display(shown, display_id):
        assert display_id
        looks.append(shown)
        return Handle

    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return looks


def test_a_cell_shows_how_far_the_run_is_in_place(cell, tmp_path, capsys):
    seen = []
    found = run(experiment(**ASKED), tmp_path / "out", on_rows=seen.extend)
    assert len(seen) == 4 and isinstance(found, Result)  # the caller's own is called too
    assert capsys.readouterr().out == "" and len({id(each) for each in cell}) == 1
    first, bar, state = repr(cell[-1]).splitlines()
    assert first.startswith("fashion_mnist_mini, 50 clients")
    assert bar.startswith(f"round 4/4 [{'=' * 50}]")
    assert re.fullmatch(r"accuracy \d+\.\d\d%  epsilon 6 of 6  [\d,.]+ clients/s", state)
    assert cell[-1]._repr_html_().startswith("<pre") and "round 4/4" in cell[-1]._repr_html_()


@pytest.mark.slow
def test_what_a_run_is_asked_for_by_its_callback_is_done_in_a_cell_too(cell, tmp_path):
    found = run(experiment(**ASKED), tmp_path / "out", on_rows=lambda rows: True)
    assert found.summary["status"] == "stopped" and found.summary["rounds"] == 1


@pytest.mark.slow
def test_progress_is_shown_where_it_is_asked_for_and_nowhere_else(tmp_path, capsys, monkeypatch):
    run(experiment(**ASKED), tmp_path / "quiet")
    assert capsys.readouterr().out == ""
    run(experiment(**ASKED), tmp_path / "shown", progress=True)
    assert "round 4/4  accuracy" in capsys.readouterr().out
    terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())  # IPython without a notebook
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert not notebook.is_notebook()


def test_a_result_shows_what_the_command_says_of_it_and_itself_in_a_line(result, tmp_path):
    html = result._repr_html_()
    assert html.startswith("<pre") and "&lt;run&gt;" in html and "<run>" not in html
    text = unescape(re.sub("<[^>]*>", "", html))
    epsilon, claimed = (f"{result.guarantees[place].epsilon:.4g}" for place in (0, -1))
    row = next(line for line in text.splitlines() if "cohort hidden  " in line)
    assert row.split() == [">", "every", "aggregate,", "cohort", "hidden", epsilon, f"{claimed}*"]
    assert "test accuracy" in text.lower() and "raydpfl report" in text
    line = repr(result)
    assert "\n" not in line and line.startswith(f"Result({result.out}: 4 rounds; test accuracy ")
    assert f"epsilon {epsilon} at delta 1e-05 for one client" in line
    sections = {"noise": {"kind": "none"}, "bounding": {"kind": "none"}}
    bare = run(experiment(**sections, evaluate={"test": False}), tmp_path / "out")
    assert repr(bare) == f"Result({tmp_path / 'out'}: 4 rounds)"
    assert "No privacy guarantee" in bare._repr_html_()


def test_a_result_is_drawn_as_the_report_draws_it(result):
    figure = result.plot()
    (axes,) = figure.axes
    (line,) = axes.get_lines()
    scored = [row for row in result.rounds.to_pylist() if row["test_accuracy"] is not None]
    assert isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG")
    assert list(line.get_xdata()) == [2, 4]
    assert list(line.get_ydata()) == [row["test_accuracy"] for row in scored]
    assert len(result.plot(["test_loss", "train_loss"], "seconds").axes[0].get_lines()) == 2
    with refusal(r"needs nowhere and round in rounds\.parquet"):
        result.plot("nowhere")


@pytest.mark.slow
def test_no_ipython_is_imported_and_the_runner_gives_plain_results():
    code = "import sys, raydpfl.cli.notebook; sys.exit('IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not hasattr(runner.RunResult, "plot")
