"""Reports: every figure from a directory alone, self-contained pages, and gaps left out by name."""

import csv
import io
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import SMALL, refusal
from matplotlib.figure import Figure
from scipy.special import stdtrit

from raydpfl import Experiment
from raydpfl.privacy import TradeOff
from raydpfl.report import compare_runs, page_of, write
from raydpfl.report.figures import Missing, Plot, parse
from raydpfl.report.figures.round_timing import PHASES
from raydpfl.report.html import Page, PageSection, render
from raydpfl.report.labels import Quantity, quantity
from raydpfl.report.pages.comparison import comparison_page
from raydpfl.report.pages.run import SECTIONS
from raydpfl.report.pages.study import epsilons
from raydpfl.report.plot_style import LegendKey, Subplot, look, whole_figure
from raydpfl.report.plot_style import render as drawn
from raydpfl.report.run_reader import LabelledRun, Run, arrange
from raydpfl.report.tables import PrintedCell, Table, csv_of, markdown

ROUNDS = 6
CLIENTS = 12
D = 5
GUARANTEE = {
    "kind": "rigorous",
    "accountant": "pld",
    "unit": "client",
    "relation": "replace_one",
    "observer": "every aggregate",
    "sampling": "fixed size 4 of 12, cohort hidden",
    "epsilon": 3.0,
    "delta": 1e-5,
    "exclusions": ["what is not counted"],
    "conditions_failed": [],
}
PAPER = {**GUARANTEE, "kind": "paper", "accountant": "paper", "epsilon": 1.0}


# of the columns of rounds.parquet: from where to where their numbers are
SPANS = {
    **dict.fromkeys(("test_loss", "test_accuracy"), (0.3, 0.9)),
    **dict.fromkeys(("train_loss", "clipped", "norm_p10", "norm_mean", "snr"), (0.1, 0.5)),
    **dict.fromkeys(("bias_within", "bias_across"), (0.1, 0.5)),
    **dict.fromkeys(("angle_p10", "angle_p50"), (60, 90)),
    **{"norm_p50": (0.6, 1), "norm_p90": (1.1, 1.5), "angle_p90": (90, 99)},
    **{"cohort": (4, 4), "bound": (1, 1), "update_angle": (80, 80), "update_norm": (0.7, 0.7)},
    **{"seconds": (1, 1), "clients_per_second": (4, 4)},
    **{f"seconds_{phase}": (0.1, 0.2) for phase in PHASES},
}


def rounds(draw: np.random.Generator) -> dict:
    done = np.arange(ROUNDS)
    found = {name: draw.uniform(*span, ROUNDS) for name, span in SPANS.items()}
    for name in ("test_loss", "test_accuracy"):  # of every second round
        found[name] = [value if t % 2 else None for t, value in enumerate(found[name])]
    spent = (done + 1) / ROUNDS
    return {"round": done, **found, "epsilon_pld": 3.0 * spent, "epsilon_paper": spent}


def clients(draw: np.random.Generator) -> dict:
    count = ROUNDS * CLIENTS
    norm = draw.uniform(0.2, 3.0, count)
    found = {"round": np.repeat(np.arange(ROUNDS), CLIENTS), "client": np.arange(count) % CLIENTS}
    bounded = {"norm": norm, "factor": np.minimum(1.0, 1.0 / norm)}
    return {**found, **bounded, "angle": draw.uniform(40, 120, count)}


def made(folder, seed=0, **changes):
    """The directory of a run with all tables there are; `changes` of its summary."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = Experiment.from_dict({**SMALL, "seed": seed}).to_dict()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tables = {"rounds": rounds(draw), "clients": clients(draw)}
    budgets = draw.uniform(0.1, 9, CLIENTS)
    spent = {"epsilon_claimed": budgets, "epsilon_pld": budgets, "epsilon_paper": budgets / 2}
    tables["guarantees"] = {"client": np.arange(CLIENTS), **spent}
    sizes = np.arange(CLIENTS) + 5
    probability = {"share": sizes / sizes.sum(), "probability": draw.dirichlet(np.ones(CLIENTS))}
    tables["selection"] = {"client": np.arange(CLIENTS), "samples": sizes, **probability}
    tables["selection"]["budget"] = budgets
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    draw.normal(size=(ROUNDS + 1, D)).astype("<f4").tofile(folder / "trajectory.bin")
    summary = {"status": "completed", "rounds": ROUNDS, "test_accuracy": 0.75, "test_loss": 0.5}
    summary |= {"seconds": 6.0, "clients_per_second": 4.0, "parameters": D, "seed": seed}
    summary |= {"population": CLIENTS, "guarantees": [GUARANTEE, PAPER], "holds": [GUARANTEE]}
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = made(tmp_path_factory.mktemp("report") / "first & <b>")
    write([folder])
    return folder


@pytest.fixture
def folder(tmp_path):
    """The directory of a run."""
    return made(tmp_path / "run")


@pytest.fixture
def one(folder):
    return Run(folder, "r")


def page(folder, name="report") -> str:
    return (folder / name / "index.html").read_text()


def with_columns(folder, **columns):
    """Other columns in rounds.parquet of a run that is there."""
    table = pq.read_table(folder / "rounds.parquet").to_pydict()
    pq.write_table(pa.table(table | columns), folder / "rounds.parquet")
    return folder


def summarise(folder, **values):
    """Other values in summary.json of what is there."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def keep(folder, names):
    """These columns alone in rounds.parquet of a run that is there."""
    table = pq.read_table(folder / "rounds.parquet").select(names)
    pq.write_table(table, folder / "rounds.parquet")
    return folder


def lean(folder, *more, seed=0):
    """The directory of a run with few columns and little to draw."""
    made(folder, seed)
    for name in ("clients", "guarantees", "selection"):
        (folder / f"{name}.parquet").unlink()
    return keep(folder, ["round", "cohort", "test_accuracy", *more])


def pieces(*folders) -> dict:
    """What a report shows and leaves out, by name or title, without drawing it."""
    found = comparison_page(compare_runs(folders)) if len(folders) > 1 else page_of(*folders)
    every = [piece for section in found.sections for piece in section.pieces]
    return {getattr(piece, "name", piece.title): piece for piece in every}


def values(table) -> list[tuple]:
    """The values in the rows of a table."""
    return [tuple(cell.value for cell in row) for row in table.cells]


class Balance(HTMLParser):
    """Whether every tag is closed, and what ids there are."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "link" and given == {"rel": "icon", "href": "data:,"}:  # asks for none
            return
        self.tags.add(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("href", "src") if name in given]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_a_page_is_well_formed_and_needs_neither_script_nor_network(run):
    text = page(run)
    found = Balance(text)
    assert not found.open and len(set(found.ids)) == len(found.ids)
    assert "http" not in text and "//" not in text.replace("://", "")
    assert not found.tags & {"script", "link", "img", "iframe", "object"} and "@import" not in text
    inside = [link.removeprefix("#") for link in found.links if link.startswith("#")]
    assert set(inside) <= set(found.ids)
    files = [link for link in found.links if not link.startswith("#")]
    assert files and all((run / "report" / link).is_file() for link in files)
    assert "first &amp; &lt;b&gt;" in text and "first & <b>" not in text


@pytest.mark.slow
def test_every_kind_of_figure_is_drawn_and_its_files_are_whole(run):
    cases = [LabelledRun({"run": "one"}, Run(run, "one"))]
    names = {path.stem for path in (run / "report" / "figures").iterdir()}
    items = [item for section in SECTIONS.values() for item in section]
    assert len(items) > 12
    for item in items:
        (drawing,) = parse({**item, "colour": "run"}, "show").make(cases)
        if "tradeoff" in item:  # this run has no curve
            assert isinstance(drawing, Missing)
            continue
        assert drawing.name in names
    for name in names:
        stem = run / "report" / "figures" / name
        root = ElementTree.fromstring(stem.with_name(f"{name}.svg").read_text())
        assert root.tag.endswith("svg") and "currentColor" in ElementTree.tostring(root).decode()
        assert stem.with_name(f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert stem.with_name(f"{name}.pdf").read_bytes().startswith(b"%PDF")
    inside = re.findall(r"<svg role.*?</svg>", page(run), flags=re.DOTALL)
    assert len(inside) > 12
    for each in inside:
        ElementTree.fromstring(each)
        assert "#010203" not in each and "<text" in each and "DejaVu" not in each
    table = (run / "report" / "tables" / "guarantees.csv").read_text()
    rows = csv.DictReader(table.splitlines())
    said = [(row["kind"], row["epsilon"], row["holds"]) for row in rows]
    assert said == [("rigorous", "3.0", "yes"), ("formula as printed", "1.0", "")]


@pytest.mark.slow
def test_the_same_directory_gives_the_same_bytes(run):
    files = [path for path in sorted((run / "report").rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    write([run])
    assert [path for path in sorted((run / "report").rglob("*")) if path.is_file()] == files
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    ("file", "gone", "why"),
    [
        ("clients", "cloud", "angle and norm in clients.parquet (measure: [clients, bounding])"),
        ("selection", "selection-by-size", "samples and probability in selection.parquet"),
        ("guarantees", "personal", "epsilon_claimed in guarantees.parquet"),
        ("trajectory", "trajectory", "trajectory.bin (measure: [trajectory])"),
    ],
)
def test_a_missing_table_leaves_its_figure_out_and_says_so(file, gone, why, folder):
    assert isinstance(pieces(folder)[gone], Plot)
    (path,) = folder.glob(f"{file}.*")
    path.unlink()
    found = pieces(folder)
    left_out = [piece.reason for piece in found.values() if isinstance(piece, Missing)]
    assert any(each.startswith(f"needs {why}") for each in left_out) and gone not in found


def test_a_damaged_table_is_told_and_the_rest_is_drawn(folder):
    (folder / "clients.parquet").write_bytes(b"PAR1 nothing")
    found = page_of(folder)
    assert [flaw.partition(" (")[0] for flaw in found.flaws] == ["clients.parquet cannot be read"]
    assert isinstance(pieces(folder)["norms"], Plot)


def test_a_run_that_goes_on_has_a_page_without_a_summary(folder):
    (folder / "summary.json").unlink()
    found = page_of(folder)
    assert found.warnings == ["There is no summary.json: the run goes on, or was killed."]
    assert not any("No privacy" in each for each in found.lead)
    assert isinstance(pieces(folder)["epsilon-by-round"], Plot)


@pytest.mark.slow
def test_a_report_of_fewer_figures_leaves_none_of_the_earlier_one(tmp_path):
    folder = lean(tmp_path / "run")
    write([folder])
    (folder / "report" / "figures" / "mine.txt").write_text("kept")
    (folder / "trajectory.bin").unlink()
    write([folder])
    names = {path.name for path in (folder / "report" / "figures").glob("*")}
    assert "trajectory.png" not in names and {"mine.txt", "test_accuracy-by-round.png"} <= names


def test_runs_with_models_of_several_sizes_have_no_path_in_common(tmp_path):
    folders = [made(tmp_path / "a"), made(tmp_path / "b", seed=1, parameters=1)]
    missing = pieces(*folders)["Path of the model on common axes"]
    assert missing.reason == "models of 1, 5 parameters have no axes in common"


def test_nothing_but_seeds_is_averaged(folder):
    labels = [("x", "1"), ("x", "2"), ("y", "1"), ("y", "1")]
    cases = [LabelledRun({"arm": arm, "size": size}, Run(folder, "r")) for arm, size in labels]
    panels = arrange(cases, "arm")
    assert [panel.title for panel in panels] == ["size 1", "size 2"]
    assert [[len(group.runs) for group in panel.groups] for panel in panels] == [[1, 2], [1]]


def test_the_last_facet_goes_across_and_the_others_down(one):
    labels = [("s", "1", "x"), ("s", "2", "x"), ("s", "1", "y"), ("t", "2", "x")]
    cases = [LabelledRun({"split": a, "size": b, "by": c}, one) for a, b, c in labels]
    found = arrange(cases, "", ("split", "size"))
    assert [each.place for each in found] == [(0, 0), (0, 1), (1, 0), (2, 1)]
    assert {each.place for each in arrange(cases[:3], "", ("size",))} == {None}
    four = arrange(cases, "", ("size",))  # are two by two
    assert [each.place for each in four] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (drawing,) = parse({"curves": "snr", "facet": ["split", "size"]}, "show.0").make(cases)
    assert drawing.across == 2
    titles = [[part and part.title for part in row] for row in drawing.grid()]
    assert titles == [
        ["s, size 1, x", "s, size 2, x"],
        ["s, size 1, y", None],
        [None, "t, size 2, x"],
    ]


@pytest.mark.parametrize("kind", ["table", "values"])
def test_the_rows_of_a_table_are_in_the_order_of_the_axes_that_it_names(kind, one):
    labels = [(a, b) for a in ("x", "y") for b in ("2", "1")]
    cases = [LabelledRun({"slow": a, "fast": b}, one, {"snr": 1.0}, 1) for a, b in labels]
    table = parse({kind: "snr", "rows": ["fast", "slow"]}, "show.0").make(cases)[0]
    assert [row[:2] for row in values(table)] == [("2", "x"), ("2", "y"), ("1", "x"), ("1", "y")]


def test_the_best_of_a_column_is_the_better_end_of_it(tmp_path):
    known = {"suboptimality": [5.0, 1.0, 2.0, 3.0, 4.0, 9.0], "test_accuracy": [0.5, 0.7, 0.6] * 2}
    run = Run(with_columns(made(tmp_path / "run"), **known), "r")
    assert run.number("best_suboptimality") == 1.0
    assert run.number("best_test_accuracy") == 0.7 and run.number("best_snr") is None


@pytest.mark.parametrize(
    ("holds", "epsilon", "delta"), [([{**GUARANTEE, "epsilon": 6.0}], 6.0, 1e-5), ([], None, None)]
)
def test_an_epsilon_of_a_cell_holds_for_every_seed_of_it(holds, epsilon, delta, tmp_path):
    runs = [made(tmp_path / "first"), made(tmp_path / "second", holds=holds)]
    row = epsilons([LabelledRun({"arm": "A"}, Run(run, "r")) for run in runs]).rows[0]
    assert (row["epsilon that holds"], row["delta"]) == (epsilon, delta)


def test_each_line_has_the_epsilon_of_its_own_run(tmp_path):
    other = {**GUARANTEE, "delta": 1e-3}
    folders = {"A": made(tmp_path / "a"), "B": made(tmp_path / "b", holds=[other])}
    cases = [LabelledRun({"arm": arm}, Run(folder, arm)) for arm, folder in folders.items()]
    item = parse({"curves": "test_accuracy", "x": "epsilon"}, "show.0")
    seen = "that of one client against an observer of every aggregate (fixed size 4 of 12, cohort "
    seen += "hidden), at delta"
    assert f"Epsilon is of A {seen} 1e-05; of B {seen} 0.001." in item.make(cases)[0].caption
    assert f"Epsilon is {seen} 1e-05." in item.make(cases[:1])[0].caption


@pytest.mark.parametrize("scaling", ["update", "gradient"])
def test_norms_of_what_is_no_update_stand_beside_no_mean_update(scaling, folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["bounding"]["scaling"] = scaling
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    cloud = pieces(folder)["cloud"]
    there = "mean update" in [key.label for key in cloud.keys]
    assert there == (scaling == "update")
    assert ("send no updates but models, gradients" in cloud.caption) == (not there)


def test_the_bias_across_clients_says_what_is_in_it_without_repeats(folder):
    assert "from their differences" in pieces(folder)["bias_within-by-round"].caption
    keep(folder, [name for name in SPANS if name != "bias_within"] + ["round"])
    caption = pieces(folder)["bias_within-by-round"].caption
    assert "Without repeats" in caption and "from their differences" not in caption


def test_the_curve_of_the_guarantee_that_holds_is_drawn_with_what_it_proves(tmp_path):
    curve = TradeOff.gaussian(1.5).to_dict()
    folder = made(tmp_path / "run", holds=[{**GUARANTEE, "curve": curve}])
    drawn = pieces(folder)
    assert {"tradeoff-attacks", "tradeoff-profile"} <= drawn.keys()
    caption = drawn["tradeoff-attacks"].caption
    assert "0.001 no attack has a true-positive rate above 0.05589" in caption
    assert "of mu 1.5 (regret 0)" in caption
    axes = [whole_figure(drawn[f"tradeoff-{of}"]).axes[0] for of in ("attacks", "profile")]
    rates, power = axes[0].lines[0].get_data()
    assert power == pytest.approx(TradeOff.gaussian(1.5).true_positives(rates))
    assert axes[1].lines[0].get_ydata()[0] == pytest.approx(curve["delta"][0])
    left_out = pieces(made(tmp_path / "old"))["Power of any attack"]
    assert left_out.reason == "needs a guarantee that holds in summary.json, by an accountant"


def test_budgets_that_nothing_finite_was_spent_of_are_left_out(folder):
    spent = {"client": [0, 1], "epsilon_claimed": [1.0, 2.0], "epsilon_pld": [np.inf, np.inf]}
    pq.write_table(pa.table(spent), folder / "guarantees.parquet")
    found = pieces(folder)
    assert "personal" not in found
    missing = found["Every client's epsilon against its budget"]
    assert missing.reason == "there is nothing to draw: no points of it are known"


def test_the_numbers_of_a_run_are_those_of_its_summary(tmp_path):
    table = pieces(made(tmp_path / "run", deep={"number": 3.5}))["summary"]
    found = dict(values(table))
    assert found["test_accuracy"] == 0.75 and found["deep.number"] == 3.5


# ---- sweeps and audits ----


def swept(folder, first="completed"):
    """The directory of a sweep of two trials; `first`: the status of the first."""
    folders = ["trials/a", "trials/b"]
    for seed, name in enumerate(folders):
        made(folder / name, seed)
    rows = {"setting": [0, 1], "local.lr": [0.1, 0.2], "seed": [0, 0]}
    rows |= {"status": [first, "completed"], "rounds": [6, 6], "test_accuracy": [0.5, 0.75]}
    rows |= {"test_loss": [0.9, 0.5], "epsilon_pld": [3.0, 3.0], "seconds": [6.0, 6.0]}
    pq.write_table(pa.table(rows | {"directory": folders}), folder / "results.parquet")
    (folder / "sweep.yaml").write_text("local: {lr: {grid: [0.1, 0.2]}}\n")
    best = {"values": {"local.lr": 0.2}, "mean": 0.75, "spread": None, "seeds": [0], "setting": 1}
    summary = {"status": "completed", "settings": 2, "metric": "test_accuracy", "best": best}
    summary |= {"trials": {"completed": 2}, "choice": "It flatters.", "seconds": 13.0}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_sweep_marks_its_best_and_says_what_its_choice_is_worth(tmp_path):
    swept(tmp_path)
    best, flatters = page_of(tmp_path).lead
    assert flatters == "It flatters." and "local.lr 0.2: test accuracy 75.00 %" in best
    found = pieces(tmp_path)
    assert [key.label for key in found["searched-local.lr"].keys] == ["best"]
    rows = rows_of(found, "settings")
    assert [(row["local.lr"], row["best"]) for row in rows] == [("0.2", "best"), ("0.1", "")]


def test_a_run_that_failed_has_no_score_in_a_sweep(tmp_path):
    """It has what it reached before."""
    swept(tmp_path, first="failed")
    rows = rows_of(pieces(tmp_path), "settings")
    head = next(name for name in rows[0] if name.startswith("test accuracy"))
    assert [row["local.lr"] for row in rows] == ["0.2", "0.1"] and not rows[1][head]


def test_clients_that_differ_less_are_better():
    assert quantity("client_accuracy_std").better == -1
    assert quantity("client_accuracy_mean").better == 1


MEMBERS = [{"kind": "clip", "bound": 1}, {"kind": "clip", "bound": 3}, {"kind": "normalize"}]


def swept_over_sections(folder):
    """A finished sweep over three members and two epsilons, two seeds each."""
    scores = (0.5, 0.52, 0.6, 0.62, 0.55, 0.57, 0.5, 0.52, 0.5, 0.52, 0.7, 0.72)
    rows = []
    for at, score in enumerate(scores):
        values = {"bounding": json.dumps(MEMBERS[at // 4]), "noise.epsilon": (2, 20)[at // 2 % 2]}
        row = {"setting": at // 2, **values, "seed": at % 2, "status": "completed", "rounds": 6}
        rows.append(row | {"test_accuracy": score, "directory": "trials/a"})
    made(folder / "trials" / "a")
    pq.write_table(pa.Table.from_pylist(rows), folder / "results.parquet")
    (folder / "sweep.yaml").write_text("")
    reached = {"mean": 0.71, "spread": 0.014, "edges": {}, "setting": 5}
    best = {"values": {"bounding": MEMBERS[2], "noise.epsilon": 20}, "seeds": [0, 1], **reached}
    edges = {"mean": 0.56, "spread": 0.01, "setting": 2, "edges": {"local.lr": "largest"}}
    best_for = {"noise.epsilon": [{"value": 2, **edges}, {"value": 20, **reached}]}
    summary = {"status": "completed", "settings": 6, "best": best, "best_for": best_for}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_sweep_over_whole_sections_names_them_and_finds_the_best_for_each_value(tmp_path):
    swept_over_sections(tmp_path)
    found = pieces(tmp_path)
    settings = values(found["settings"])
    assert [row[0] for row in settings[:2]] == ["normalize", "clip, bound 1"]
    assert [row[5] for row in settings] == ["best", *[""] * 5]
    per_value = found["best-for-noise.epsilon"]
    assert per_value.heads[-2:] == ["bounding", "at an edge"]
    assert [[*row[:2], *row[3:6]] for row in values(per_value)] == [
        ["2", 0.56, 2, "clip, bound 3", "local.lr"],
        ["20", 0.71, 2, "normalize", ""],
    ]
    drawing = found["searched-noise.epsilon"]
    names = ["clip, bound 1", "clip, bound 3", "normalize"]
    assert [key.label for key in drawing.keys] == [*names, "best"]
    assert "one sample standard deviation over the seeds (up to 2)" in drawing.caption
    axes = whole_figure(drawing).axes[0]
    assert axes.get_xscale() == "log" and len(axes.containers) == 6  # an error bar for each mean
    assert [*axes.get_xticks()] == [2, 20]
    low, high = axes.get_ylim()
    assert low < 0.5 and high > 0.71 + 0.0142
    axes = whole_figure(found["searched-bounding"]).axes[0]
    assert [each.get_text() for each in axes.get_xticklabels()] == names
    assert "{" not in "".join(page_of(tmp_path).lead)


def test_an_audit_shows_its_bounds_against_the_claims(tmp_path):
    estimate = {"epsilon": 2.0, "low": 1.5, "high": 2.5}
    view = {"claimed": GUARANTEE, "canaries": 8, "guesses": 4, "right": 4, "lower": 0.5}
    view |= {"reach": 1.0, "confidence": 0.95, "estimate": estimate}
    view |= {"refuted": False, "exceeded": True}
    check = {"name": "keys", "passed": False, "finding": "<used twice>", "false_alarm": 1e-4}
    facts = {"passed": False, "verdict": "In doubt.", "runs": 1, "seed": 3, "notes": []}
    (tmp_path / "audit.json").write_text(json.dumps(facts | {"views": [view], "checks": [check]}))
    scores = {"view": [0] * 8, "inside": [0, 1] * 4, "score": np.arange(8.0)}
    pq.write_table(pa.table(scores), tmp_path / "scores.parquet")
    assert page_of(tmp_path).lead[0] == "In doubt."
    found = pieces(tmp_path)
    assert rows_of(found, "checks")[0]["passed"] == "FAILED"
    (row,) = rows_of(found, "views")
    shown = (row["epsilon claimed"], row["proven at least"], row["claim"])
    assert shown == ("3", "0.5", "in doubt")
    figures = [whole_figure(found[name]) for name in ("bounds", "scores")]
    assert figures[0].axes[0].get_xlim() == (0, pytest.approx(1.15 * 3))
    assert len(figures[1].axes[0].patches) == 4  # two histograms, filled and outlined


# ---- studies ----

SHOW = """
- {curves: test_accuracy, facet: [data]}
- {table: test_accuracy, rows: [data], best: true, against: B, published: printed.csv}
- {points: test_accuracy, x: data}
- {cloud: angle, only: {accounting: "true"}, note: Of the true ones.}
- {trajectory: {}}
- {selection: probability, x: budget}
- {selection_map: {}}
- {scatter: test_accuracy, x: rounds.snr, against: B, colour: arm}
- {values: [test_loss, deep.number]}
"""
ARMS = ("A-1", "B", "Free")  # the last of them is not private
SCORES = {"A-1": 0.5, "B": 0.25, "Free": 0.75}


def studied(folder):
    """The directory of a study of two panels, three arms, two accountings and two seeds."""
    about = {"id": "mine/one", "title": "<one>", "shows": "The claim.", "scale": "small"}
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump({"study": about, "show": yaml.safe_load(SHOW)}) + "...\n"
    (folder / "study.yaml").write_text(text)
    every = itertools.product(("iid", "0.5"), ("paper", "true", None), ARMS, (1, 2))
    rows = [_row(folder, *of) for of in every if (of[1] is None) == (of[2] == "Free")]
    pq.write_table(pa.Table.from_pylist(rows), folder / "results.parquet")
    tried = [
        row
        | {"validation_accuracy": 0.5 * lr, "chosen": lr == 1.0}
        | {"values": json.dumps({"local.lr": lr, "server.lr": rate})}
        for row in rows
        for lr in (0.1, 1.0)
        for rate in (0.5, 0.25)[: row["seed"]]
    ]
    pq.write_table(pa.Table.from_pylist(tried), folder / "tuning.parquet")
    identity = {"arms": ["A-1", "B"], "at": {"data": "iid"}, "held": False, "compared": 2}
    summary = {"status": "completed", "reason": None, "seeds": [1, 2], "cells": 12}
    summary |= {"identities": [identity | {"one_run": 0, "broken": [{}]}], "final": {"runs": 20}}
    summary |= {"tuning": {"judge": "validation_accuracy", "statement": "By one seed."}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "published").mkdir(exist_ok=True)
    printed = "dataset,setting,algorithm,accuracy\nfashion_mnist_mini,iid,a1,44.5\nmnist,iid,b,99\n"
    (folder / "published" / "printed.csv").write_text(printed)
    return folder


def _row(folder, data, accounting, arm, seed):
    name = f"{data}-{accounting}-{arm}-{seed}"
    private = {} if arm != "Free" else {"guarantees": [], "holds": []}
    made(folder / "trials" / name, seed, deep={"number": seed}, **private)
    row = {"data": data, "arm": arm, "accounting": accounting, "seed": seed}
    row |= {"status": "completed", "values": json.dumps({"local.lr": 0.1})}
    row |= {"directory": f"trials/{name}", "test_accuracy": SCORES[arm] + 0.01 * seed}
    return row | {"best_test_accuracy": 0.9, "deep.number": float(seed), "test_loss": 0.5}


def results(folder) -> list[dict]:
    """The rows of what a sweep or a study found."""
    return pq.read_table(folder / "results.parquet").to_pylist()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return studied(tmp_path_factory.mktemp("study") / "study")


@pytest.fixture(scope="module")
def items(study):
    return pieces(study)


def rows_of(items, name):
    """The rows of a table in print, by head."""
    table = items[name]
    texts = [[cell.text for cell in row] for row in table.cells]
    return [dict(zip(table.heads, row, strict=True)) for row in texts]


@pytest.mark.slow
def test_a_study_shows_every_item_of_its_list(items):
    names = {"test_accuracy-by-round", "test_accuracy-over-data", "cloud", "trajectory"}
    names |= {"selection-by-budget", "selection_map", "test_accuracy-over-rounds.snr"}
    names |= {"values-test_loss-deep.number", "table-test_accuracy"}
    assert names <= items.keys() and not any(isinstance(each, Missing) for each in items.values())
    assert items["cloud"].caption.endswith("Of the true ones.")
    titles = [f"{a}, {b} accounting" for a in ("iid", "data 0.5") for b in ("paper", "true")]
    assert [part.title for part in items["test_accuracy-by-round"].subplots] == titles


def test_a_table_has_means_spreads_and_differences_over_the_seeds(items):
    first = rows_of(items, "table-test_accuracy")[0]
    means = {"A-1": "51.50", "B": "26.50", "Free": "76.50"}
    # of two seeds 0.01 apart: Student's t with one degree of freedom times 0.005 times sqrt(2)
    half = f"{100 * 12.7062 * 0.005 * 2**0.5:.2f}"
    means = {arm: f"{mean} \N{PLUS-MINUS SIGN} {half} %" for arm, mean in means.items()}
    assert first == {"data": "iid", "accounting": "paper", **means}
    paired = rows_of(items, "differences-test_accuracy")[0]
    assert paired["A-1"] == "+25.00 \N{PLUS-MINUS SIGN} 0.00" and "B" not in paired
    assert rows_of(items, "table-best_test_accuracy")[0]["B"].startswith("90.00")


def test_a_run_without_noise_stands_under_every_accounting(items):
    rows = rows_of(items, "table-test_accuracy")
    assert len(rows) == 4 and len({row["Free"] for row in rows}) == 1
    assert rows_of(items, "epsilons")[0]["epsilon that holds"] == "3"


def test_a_printed_number_is_beside_ours_only_for_the_same_task(items):
    cells = {
        (row["data"], row["arm"]): row
        for row in rows_of(items, "cells-test_accuracy")
        if row["accounting"] == "paper"
    }
    assert cells["iid", "A-1"]["printed"] == "44.5 %"
    assert cells["iid", "B"]["printed"] == ""
    assert cells["iid", "B"]["printed for another task"] == "other task: 99 % on mnist"
    assert cells["0.5", "A-1"]["printed"] == ""


def test_a_csv_has_all_numbers_of_a_cell_in_one_unit_which_it_names(items):
    rows = csv.DictReader(csv_of(items["cells-test_accuracy"]).splitlines())
    row = next(row for row in rows if row["arm"] == "A-1")
    assert (row["mean"], row["printed"], row["unit"]) == ("0.515", "0.445", "fraction")
    losses = csv_of(items["values-test_loss-deep.number"])
    assert "unit" not in losses.splitlines()[0]


def test_a_study_tells_its_scale_and_what_is_broken(study, items):
    found = page_of(study)
    assert found.title == "Study mine/one: <one>"
    assert any("not the paper's own" in each for each in found.warnings)
    assert "An identity is broken; see Identities." in found.warnings
    assert rows_of(items, "identities")[0]["held"] == "BROKEN"
    assert rows_of(items, "tuning")[0]["local.lr"] == "1"
    assert rows_of(items, "tuning")[0]["at an edge"] == "local.lr and server.lr"
    ranked = "iid, paper accounting: Free 76.50 ± 8.98 %, A-1 51.50 ± 8.98 %, B 26.50 ± 8.98 %."
    assert found.lead[1] == ranked


def test_what_values_were_chosen_by_is_drawn_over_each_of_them(items):
    drawing = items["tuned-local.lr"]
    by = (", paper accounting", ", true accounting", "")
    titles = [f"{data}{more}" for data in ("iid", "data 0.5") for more in by]
    assert [part.title for part in drawing.subplots] == titles
    assert [key.label for key in drawing.keys] == ["A-1", "B", "Free", "chosen"]
    figure = Figure()
    axes = figure.subplots()
    drawing.subplots[0].draw(axes)
    lines = [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() != "None"]
    assert lines == [[[0.1, 0.05], [1.0, 0.5]]] * 2  # the best of two rates of the server
    stars = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "*"]
    assert stars and all(each == [[1.0, 0.5]] for each in stars)
    assert "tuned-server.lr" in items


@pytest.mark.slow
def test_intervals_have_the_choice_of_settings_in_them(tmp_path):
    folder = studied(tmp_path / "study")
    rows = results(folder)
    # where tuning seed 1 alone chooses, A-1 is worse by 0.1
    resamples = [
        row | {"tuning_seeds": seeds, "test_accuracy": row["test_accuracy"] - worse}
        for row in rows
        if row["arm"] == "A-1"
        for seeds, worse in (("0 0", 0.0), ("0 1", 0.0), ("1 1", 0.1))
    ]
    pq.write_table(pa.Table.from_pylist(resamples), folder / "resamples.parquet")
    found = pieces(folder)
    final, tuning = 0.005**2, 2 * 0.25 * 0.75 * 0.1**2
    freedom = (final + tuning) ** 2 / (final**2 + tuning**2)  # of one degree each
    half = stdtrit(freedom, 0.975) * 2**0.5 * (final + tuning) ** 0.5
    first = rows_of(found, "table-test_accuracy")[0]
    assert first["A-1"] == f"51.50 ± {100 * half:.2f} %" and first["B"] == "26.50 ± 8.98 %"
    # against B, seed by seed: tuning is all that varies; two comparisons, so at 97.5 %
    half = 25.4517 * tuning**0.5
    assert rows_of(found, "differences-test_accuracy")[0]["A-1"] == f"+25.00 ± {100 * half:.2f}"


@pytest.mark.slow
def test_verdicts_stand_on_the_page_with_their_intervals_and_what_computed_them(tmp_path):
    folder = studied(tmp_path / "study")
    claim = {"says": "A-1 is ahead", "of": "test_accuracy", "by": 0.0, "within": None}
    numbers = {"difference": 0.25, "low": 0.125, "high": 0.375, "level": 0.975, "seeds": 2}
    counts = {"cells": 4, "holds": 3, "reversed": 0, "not resolved": 1}
    holds = {**claim, "verdict": "holds", **numbers, **counts}
    summarise(
        folder,
        claims=[holds, {**claim, "verdict": "not run", "cells": 0}],
        equal_arms=[{"arms": ["A-1", "B"], "at": {"data": "iid"}}],
        computed_by={"raydpfl": "1.0", "torch": "2", "compiled": "ab", "commit": "cd"},
    )
    found = pieces(folder)
    first, second = rows_of(found, "claims")
    shown = [first[name] for name in ("verdict", "of", "difference", "from", "to", "level")]
    assert shown == ["holds", "test accuracy, points", "+25.00", "+12.50", "+37.50", "97.50%"]
    assert second["verdict"] == "not run" and second["difference"] == ""
    same = "A-1 and B are the same bits in all seeds at data iid."
    assert found["Arms that are one"].paragraphs == [same]
    by = "Computed by raydpfl 1.0 at commit cd, compiled code ab, torch 2."
    assert found["cells-test_accuracy"].caption.endswith(by)
    tiles = {tile.what: (tile.value, tile.note) for tile in page_of(folder).tiles}
    assert tiles["claims that hold"] == ("1 of 2", "1 not run")


def test_lines_of_one_label_stand_side_by_side_so_that_equal_ones_are_seen(items):
    axes = whole_figure(items["test_accuracy-over-data"]).axes[0]
    lines = [line for line in axes.lines if line.get_linestyle() != "None"]
    lines = [line for line in lines if len(line.get_xdata())]
    assert len(lines) == len(ARMS)
    place = lines[0].get_xdata()[0], 0.5
    places = [line.get_transform().transform(place)[0] for line in lines]
    gaps = np.diff(places) * 72 / axes.figure.dpi  # in points of print
    assert gaps == pytest.approx(3) and len({tuple(line.get_xdata()) for line in lines}) == 1


def test_a_point_is_a_cell_over_another_number_of_it(items):
    figure = whole_figure(items["test_accuracy-over-rounds.snr"])
    points = [line.get_xydata() for line in figure.axes[0].lines]
    # at two labels and two accountings A-1 is 0.25 ahead of B and Free 0.5; B has no point
    gains = [0.25] * 4 + [0.5] * 4
    assert sorted(point[1] for line in points for point in line) == pytest.approx(gains)


@pytest.mark.slow
def test_a_failed_run_of_a_study_is_in_no_mean(tmp_path):
    folder = studied(tmp_path / "study")
    rows = results(folder)
    rows[0]["status"] = "failed"
    pq.write_table(pa.Table.from_pylist(rows), folder / "results.parquet")
    found = pieces(folder)
    assert rows_of(found, "table-test_accuracy")[0]["A-1"] == "52.00 %"
    assert rows_of(found, "runs")[0]["status"] == "failed"


@pytest.mark.slow
def test_a_study_has_a_page_on_which_no_two_things_have_one_id(study):
    write([study])
    found = Balance(page(study))
    assert not found.open and "Study mine/one: &lt;one&gt;" in page(study)
    assert len(found.ids) > 20 and len({*found.ids}) == len(found.ids)
    names = {path.name for path in (study / "report" / "figures").iterdir()}
    assert {"cloud.pdf", "trajectory.svg", "test_accuracy-by-round.png"} <= names


# ---- what is refused ----


def test_what_is_no_directory_of_ours_is_refused_in_one_line(tmp_path, complain):
    said = complain(("report", tmp_path, "--columns", "3"))
    assert said.startswith("--columns = 3: ") and said.endswith("1 or 2, the columns of a paper")
    said = complain(["report", tmp_path])
    assert said.endswith("a run, a sweep, an audit or a study; this one holds none of them")
    said = complain(["report", tmp_path / "nowhere"])
    assert said.endswith("there is no such directory")
    folder = made(tmp_path / "run")
    (tmp_path / "audit.json").write_text("{}")
    said = complain(["report", folder, tmp_path])
    assert said.endswith("where several are compared; this one (audit) has no run that has ended")
    said = complain(["report", tmp_path])
    assert "the file of an audit (it is not what an audit writes)" in said


def test_a_place_that_cannot_be_written_is_named(tmp_path, complain):
    folder = made(tmp_path / "run")
    (folder / "report").write_text("in the way")
    said = complain(["report", folder])
    assert said.startswith("--out = ") and "a directory that can be made" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    said = complain(["report", folder, "--out", tmp_path / "full"])
    assert "a new or empty directory, or that of a report" in said
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


WRONG = (
    ({"curves": "test_accuracy", "log": "x"}, r"show\[0\].log = 'x'"),
    ({"curves": "test_accuracy", "colr": "arm"}, r"colr = 'arm': expected one of the keys"),
    ({"curves": "test_accuracy", "facet": ["dato"]}, "one of the axes .*data; nearest: data"),
    ({"table": "snr", "against": "Clib"}, "labels of arm: Clip, Free; nearest: Clip"),
    ({"norms": {}, "only": {"data": ["it"]}}, "'it': expected one of the labels of data: iid"),
    ({"table": "snr", "colour": "arm"}, r"colour = 'arm': expected one of the keys"),
    ({"values": "snr", "facet": ["data"]}, r"facet = \['data'\]: expected one of the keys"),
    ({"trajectory": "path"}, r"trajectory = 'path': expected {}: it shows no number"),
)


@pytest.mark.parametrize(("item", "said"), WRONG)
def test_an_item_of_a_show_list_names_what_is_wrong_with_it(item, said):
    with refusal(said):
        parse(item, "show[0]", {"arm": ["Clip", "Free"], "data": ["iid"]})


# ---- the command ----


@pytest.mark.slow
def test_a_run_and_its_report_by_the_commands(small, tmp_path, typed):
    out = tmp_path / "o"
    measured = "measure=[clients, bounding, trajectory]"
    for words in (["run", small, measured, "--out", out, "--quiet"], ["report", out]):
        code, said, _ = typed(*words)
        assert code == 0
    assert said.strip() == f"Report: {out / 'report' / 'index.html'}"
    left_out = page(out).partition('id="left-out"')[2]
    assert set(re.findall(r"<li><strong>(.*?)</strong>", left_out)) == {
        *(f"{what} by second" for what in ("Test accuracy", "Loss", "Epsilon")),  # under 5 s
        "Every client&#39;s epsilon against its budget",
        "Probability of selection over the clients&#39; budgets",
        "Probability of selection over the clients&#39; sizes",
    }


def test_tables_say_the_same_in_three_forms():
    share = Quantity("share", "share", percent=True)
    table = Table("t", "T", "Of.", [{"name": "<a|b>", share: 0.5}, {"name": "c"}])
    assert "| &lt;a\\|b&gt; | 50.00 % |" in markdown(table)
    assert csv_of(table) == "name,share\n<a|b>,0.5\nc,\n"
    page = render(Page("P", [], [], [PageSection("S", [table])]), {})
    assert "&lt;a|b&gt;" in page and "50.00\xa0%" in page


FORMULAS = ("=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", " =1", "\uff1d1+1", "-2+3", "\r=1", "\n=1")
NUMBERS = (-0.5, np.float32(-2.0), -3, "-0.5", "+1e-3", "-inf", "a=1", "1-2", "", True)


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers():
    pairs = zip(FORMULAS, NUMBERS, strict=True)
    rows = [{"=cmd()": PrintedCell(text, text), "-n": number} for text, number in pairs]
    table = Table("t", "T", "Of.", rows, unit="@u")
    inside = replace(table, rows=[{"=cmd()": f"a{text}"} for text in (*FORMULAS[:2], "\r=1")])
    assert all(row[0][0] == "a" for row in list(csv.reader(csv_of(inside).splitlines()))[1:])
    head, *found = csv.reader(io.StringIO(csv_of(table), newline=""))
    assert head == ["'=cmd()", "'-n", "unit"] and all(row[2] == "'@u" for row in found)
    assert [row[0] for row in found] == [f"'{' '.join(text.splitlines())}" for text in FORMULAS]
    assert [row[1] for row in found] == [str(number) for number in NUMBERS]


def test_what_markdown_shows_is_neither_html_nor_a_link():
    hostile = "<img src=x onerror=alert(1)> &lt; [a](javascript:b)"
    table = Table("t", hostile, hostile, [{hostile: hostile}])
    found = markdown(table)
    assert "<" not in found and "](" not in found and found.count("&lt;img") == 4
    assert "&amp;lt;" in found


def test_panels_beside_one_another_leave_their_text_large_enough_for_a_narrow_page(tmp_path):
    parts = [Subplot(f"panel {place}", lambda axes: axes.plot([0, 1])) for place in range(4)]
    for count, most, rows in ((1, 4.6, [1]), (2, 7.0, [2]), (3, 7.0, [2, 2]), (4, 7.0, [2, 2])):
        drawing = Plot("few", "Few", "", parts[:count])
        assert drawing.across == 0 and whole_figure(drawing).get_size_inches()[0] <= most
        assert [len(row) for row in drawing.grid(2)] == rows
    # four columns are two by two
    run = Run(made(tmp_path / "run"), "r")
    labels = [(a, b) for a in "st" for b in "1234"][:7]
    cases = [LabelledRun({"split": a, "size": b}, run) for a, b in labels]
    (drawing,) = parse({"curves": "snr", "facet": ["split", "size"]}, "show.0").make(cases)
    figure = whole_figure(drawing)
    assert drawing.across == 4 and figure.get_size_inches()[0] <= 7.16
    titles = [each.get_title(loc="left") for each in figure.axes]
    assert titles == [f"{a}, size {b}" for a, b in labels] + [""]
    assert {each.get_subplotspec().get_geometry()[:2] for each in figure.axes} == {(4, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "inches"), [(1, 3.5), (2, 7.16)])
def test_figures_for_a_paper_are_as_wide_as_its_columns_with_text_of_eight_points(columns, inches):
    def draw(axes):
        axes.plot([0, 1], label="some")
        axes.set_xlabel("round")

    parts = [Subplot(f"panel {place}", draw) for place in range(4)]
    files, inline = drawn(Plot("few", "Few", "", parts, [LegendKey("some", look(0))]), columns)
    svg = files["svg"].decode()
    assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == pytest.approx(72 * inches)
    box = re.search(rb"/MediaBox \[([^\]]*)\]", files["pdf"])[1].split()
    assert float(box[2]) == pytest.approx(72 * inches)
    assert {*re.findall(r"font(?:-size)?: ([\d.]+)px", svg)} == {"8"}
    assert re.search(r"font(-size)?: 10px", "".join(inline))  # the page is no paper


def test_what_bounding_left_is_named_only_where_it_is_drawn(folder):
    assert pieces(folder)["norms"].title == "Norms before and after bounding"
    (folder / "clients.parquet").unlink()
    found = pieces(folder)["norms"]
    assert found.title == "Norms before bounding"
    assert "drawn of runs with measure: [clients]" in found.caption
    assert [key.label for key in found.keys] == ["before bounding", "bound in force"]


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_curves_by_second_need_a_run_of_some_seconds_unless_they_are_asked_for(seconds, folder):
    with_columns(folder, seconds=[seconds] * ROUNDS)
    shown = pieces(folder)
    titles = {each.title: each for each in shown.values()}
    assert isinstance(titles["Test accuracy by second"], Plot) == (seconds == 1.0)
    assert isinstance(titles["Test accuracy by round"], Plot)
    case = LabelledRun({"run": "r"}, Run(folder, "r"))
    asked = parse({"curves": "test_accuracy", "x": "seconds"}, "show.0")
    assert isinstance(asked.shown([case])[0], Plot)


@pytest.mark.parametrize(("first", "scale"), [(1.0, "linear"), (0.4, "log")])
def test_an_axis_of_epsilon_is_logarithmic_from_a_factor_of_four(first, scale, folder):
    spent = np.linspace(first, 3.0, ROUNDS)
    spent[1] = first  # evaluations are at every second round
    with_columns(folder, epsilon_pld=spent)
    assert whole_figure(pieces(folder)["test_accuracy-by-epsilon"]).axes[0].get_xscale() == scale
