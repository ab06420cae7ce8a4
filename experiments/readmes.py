"""Copies the results of studies, and writes the README of each paper from them.

    python experiments/readmes.py runs/002-fig5 runs/002-fig7

copies the tables, the figures and the summary of these directories to `experiments/ID`
(`experiments/ID-paper` where they ran at the paper's size), in place of earlier ones. Then
`experiments/PAPER/README.md` is written, of every paper and of other simulators, from what lies
there and from the files of the studies: no number and no verdict in it is written by hand. So is
the end of `experiments/README.md`, the state of every table, figure, claim and theorem
(`items.csv`).
"""

import csv
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from raydpfl.sweep.study import Study, builtin

ROOT = Path(__file__).parent
SCALES = {"small": "", "paper": "-paper"}  # what is added to the id of a study, for its folder
SIZES = 400_000  # bytes of a figure, at most: clouds of points have more
PAPERS = {
    "000": (
        "clipping in federated learning, and client-level privacy",
        "Zhang, Chen, Hong, Wu and Yi, *Understanding Clipping for Federated Learning* (2021). "
        "Losses are means over the clients, a third of the paper's f. Where noise is calibrated, "
        "`paper` is Theorem 3.2's, and `true` exact accounting at the same epsilon.",
    ),
    "001": (
        "normalising instead of clipping",
        "Das et al., *On the Convergence of Differentially Private Federated Learning on "
        "Non-Lipschitz Objectives, and with Normalized Client Updates* (2021). Our copy has lost "
        "every formula and number of section 5.3 and the settings of section 6. `paper` is noise "
        "by Theorem 1 with its open constant v = 4, `true` exact accounting at the same epsilon.",
    ),
    "002": (
        "noise at local steps, tCDP, adaptive servers",
        "Chen, Ding, Bao, Zhou and Jin, *Differentially Private Federated Learning on Non-iid "
        "Data: Convergence Analysis and Adaptive Optimization* (2024). By `paper` DPNFL and "
        "AdDPNFL have noise by tCDP and the baselines by RDP; by `true` all have exact accounting "
        "at the same epsilon. Clients for whom a condition of tCDP fails have noise by exact "
        "accounting in either: at small after one or two participations, and in 002/fig1-network "
        "those of fewer than 450 rows to train on. The weight decay of softmax regression, 1e-3, "
        "is that of an L2 term of half the printed 1e-3 ||w||^2.",
    ),
    "003": (
        "personal privacy budgets and privacy-aware selection",
        "Xu, Zhang and Huang, *Tackling Privacy Heterogeneity in Differentially Private Federated "
        "Learning* (2026). By `paper` noise is the paper's sigma_k; by `true` exact accounting at "
        "the same budgets.",
    ),
    "simulators": (
        "workloads of other simulators",
        "What FLUTE, BlazeFL and pfl-research publish about themselves, at scale `paper` with the "
        "same clients, cohorts, batches, rates and nets; and workloads after LEAF, Wang et al., "
        "Andrew et al. and Kairouz et al., on other data and with values chosen here. "
        "`docs/simulators.md` has their numbers beside ours.",
    ),
}
STUDIES = builtin.paths() | {"simulators/shakespeare": ROOT / "studies" / "shakespeare.yaml"}
PROTOCOL = (
    "Everything below is written by `python experiments/readmes.py` from the tables in the folders "
    "of the studies. Values are chosen by the tuning seeds, means are of the final seeds; a "
    "plus-minus is half of the 95 % interval in which the mean of a repetition with other seeds "
    "falls, tuning included; verdicts are computed (`docs/studies.md`). A claim is *not run* where "
    "the scale leaves its cells out. Bands and bars of figures are one sample standard deviation "
    "over the final seeds, without tuning. A verdict is *near an edge* where an end of its "
    "interval lies within half of the half-width of the number that decides: other seeds may well "
    "give another verdict."
)
MARK = "## What was found"
STATES = (
    "The command shows the item, a study at the scale of its first state, or at `paper`. "
    "`small` and `paper`: a table of that scale lies here. `smoke`: the study runs in the tests, "
    "at a size that says nothing of the claim. `not run`: it is of the scale `paper` alone. "
    "`test`: an accountant, a formula or a solver that a test holds to the paper. "
    "`python experiments/readmes.py` writes the table."
)


def copy_results(folder: Path) -> None:
    """Copies the tables, figures and summary of a study's directory to `experiments/ID`."""
    summary = json.loads((folder / "summary.json").read_text())
    place = ROOT / (summary["study"] + SCALES[summary["scale"]])
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copyfile(folder / "study.yaml", place / "study.yaml")
    (place / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for file in sorted((folder / "report" / "tables").iterdir()):
        shutil.copyfile(file, place / file.name)
    for file in sorted((folder / "report" / "figures").glob("*.svg")):
        if not file.name.startswith("tuned-") and file.stat().st_size < SIZES:
            shutil.copyfile(file, place / file.name)


def readme(paper: str) -> str:
    """The README of a paper."""
    title, about = PAPERS[paper]
    ids = [name for name in STUDIES if name.startswith(paper)]
    rows = [
        "| study | also found as | run here | claims that hold | command |",
        "|---|---|---|---|---|",
    ]
    rows += [_row(name, folder) for name in ids for folder in _folders(name) or [None]]
    sections = [_section(name, folder) for name in ids for folder in _folders(name)]
    return "\n\n".join([f"# {paper}: {title}", about, PROTOCOL, "\n".join(rows), *sections]) + "\n"


def _folders(name: str) -> list[Path]:
    """Where a study lies here, a folder for each scale at which it was run."""
    places = [ROOT / (name + added) for added in SCALES.values()]
    return [folder for folder in places if (folder / "summary.json").exists()]


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def _row(name: str, folder: Path | None) -> str:
    summary = _summary(folder) if folder else {}
    scale = summary.get("scale", "not run")
    held = _verdicts(summary) if summary.get("claims") else ""
    answers = ", ".join(builtin.header(STUDIES[name]).get("answers", ()))
    file = name if name in builtin.paths() else f"experiments/{STUDIES[name].relative_to(ROOT)}"
    command = f"`raydpfl reproduce {file} --scale {scale if folder else 'small'}`"
    linked = f"[{name}]({folder.name})" if folder else name
    return f"| {linked} | {answers} | {scale} | {held} | {command} |"


def _verdicts(summary: dict[str, Any]) -> str:
    verdicts = [claim["verdict"] for claim in summary["claims"]]
    names = ("reversed", "equal", "not resolved", "not run")
    counts = {name: verdicts.count(name) for name in names}
    counts["near an edge"] = sum(map(_near_edge, summary["claims"]))
    others = "".join(f", {count} {name}" for name, count in counts.items() if count)
    return f"{verdicts.count('holds')} of {len(verdicts)}{others}"


def _near_edge(claim: dict[str, Any]) -> bool:
    """Whether other seeds may well give another verdict."""
    if claim.get("low") is None:
        return False
    edges = [claim["by"]] if claim["within"] is None else [-claim["within"], claim["within"]]
    reach = (claim["high"] - claim["low"]) / 4
    return any(abs(claim[end] - edge) < reach for end in ("low", "high") for edge in edges)


def _section(name: str, folder: Path) -> str:
    """The section of a study at one scale: its claims, tables and figures."""
    summary = _summary(folder)
    about = builtin.header(STUDIES[name])
    parts = [f"## {name}: {about['title']}"]
    if summary["scale"] == "paper":
        parts = [f"## {name} at the paper's size"]
    if folder == _folders(name)[0]:
        subject = "What is asked" if name.startswith("simulators") else "The paper"
        parts += [f"*{subject}.* {_line(about['shows'])}", f"*Chosen here.* {_line(about['lost'])}"]
    parts.append(_facts(folder, summary))
    tables = ["claims.md", *sorted(path.name for path in folder.glob("table-test*.md"))]
    tables += sorted(path.name for path in folder.glob("table-s*.md"))
    tables += sorted(path.name for path in folder.glob("values-*.md"))
    parts += [_table(folder / table) for table in tables if (folder / table).exists()]
    says = [claim["says"] for claim in summary["claims"] if _near_edge(claim)]
    parts += [f"Near an edge: {'; '.join(says)}."] if says else []
    parts += [_arms(summary)] if summary["equal_arms"] else []
    figures = sorted(path.name for path in folder.glob("*.svg"))
    parts += [f"![{Path(figure).stem}]({folder.name}/{figure})" for figure in figures[:3]]
    return "\n\n".join(parts)


def _line(text: str) -> str:
    return " ".join(str(text).split())


def _table(path: Path) -> str:
    """A table below its title, without the rest of its caption."""
    caption, *lines = path.read_text().splitlines()
    title = caption[: caption.index("**", 2) + 2]
    return "\n".join([title, "", *(row for row in lines if row.startswith("|"))])


def _facts(folder: Path, summary: dict[str, Any]) -> str:
    runs, tried = summary["final"]["runs"], summary["tried"]
    failed_count = f" ({tried['failed']} failed)" if tried["failed"] else ""
    text = f"*Run.* Scale {summary['scale']}, {tried['runs']} runs to choose values by"
    text += f"{failed_count}, {runs} final ones"
    text += f" with seeds {summary['seeds'][0]} to {summary['seeds'][-1]}"
    by = summary["computed_by"]
    text += f", {summary['seconds']:.0f} seconds; commit {by['commit']}."
    path = folder / "tuning.csv"
    if path.exists():
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
        edges = sum(bool(row["at an edge"]) for row in rows)
        text += f" Of {len(rows)} choices {edges} have a value at an end of their grids"
        text += f" ([tuning]({folder.name}/tuning.md))."
    tuning = summary["tuning"]
    if tuning and not tuning["equal"]:
        tried = [f"{arm} {least} to {most}" for arm, (least, most) in tuning["settings"].items()]
        text += f" Settings tried in a cell, as arms have values of their own: {', '.join(tried)}."
    return text


def _arms(summary: dict[str, Any]) -> str:
    """The arms that are one."""
    lines = []
    for one in summary["equal_arms"]:
        at = ", ".join(f"{axis} {label}" for axis, label in one["at"].items())
        arms = " and ".join(one["arms"])
        lines.append(f"- {arms} are the same bits in all seeds{f' at {at}' if at else ''}.")
    return "\n".join(lines)


def items() -> str:
    """The state of every table, figure, claim and theorem of the papers."""
    rows = ["| paper | item | shown by | state | note |", "|---|---|---|---|---|"]
    with (ROOT / "items.csv").open(newline="") as file:
        for item in csv.DictReader(file):
            where = item["where"]
            command, state = f"`pytest {where}`" if where else "", "test" if where else "missing"
            if where and ".py" not in where:
                command, state = _command_and_state(where, item["label"])
            cells = (item["paper"], item["item"], command, state, item["note"])
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _command_and_state(name: str, label: str) -> tuple[str, str]:
    """The command that runs a study, and the scales at which it lies here with this label; else
    whether the tests run it.
    """
    scales = [_summary(place)["scale"] for place in _folders(name) if label in _labels(place)]
    state = ", ".join(scales)
    if not scales:
        state = "smoke" if label in _labels_of(Study.named(name, "smoke")) else "not run"
        scales = ["smoke" if state == "smoke" else "paper"]
    only = ""
    if label:
        labels = Study.named(name, scales[0]).labels
        axis = next(axis for axis, names in labels.items() if label in names)
        only = f" --only {axis}={label}"
    return f"`raydpfl reproduce {name} --scale {scales[0]}{only}`", state


@functools.cache
def _labels(folder: Path) -> set[str | None]:
    """All labels of the cells of a study that lies here."""
    return _labels_of(Study.from_directory(folder))


def _labels_of(study: Study) -> set[str | None]:
    """All labels of its cells, and the empty one, of an item that is all of it."""
    return {"", *(text for cell in study.cells for text in cell.labels.values())}


def overview() -> str:
    """The verdicts of all studies, a line each."""
    lines = []
    for paper, (title, _) in PAPERS.items():
        lines.append(f"- [{paper}]({paper}/README.md), {title}:")
        ids = [name for name in STUDIES if name.startswith(paper)]
        for study, folder in ((name, folder) for name in ids for folder in _folders(name)):
            summary = _summary(folder)
            if summary["claims"]:
                title = builtin.header(STUDIES[study])["title"]
                if summary["scale"] == "paper":
                    title = "at the paper's size"
                lines.append(f"    - `{study}`, {title}. Claims that hold: {_verdicts(summary)}.")
    return "\n".join(lines)


def front(text: str) -> str:
    """The text of the README of all experiments, its end from `MARK` on written again."""
    by_hand = text.partition(MARK)[0]
    return f"{by_hand}{MARK}\n\n{overview()}\n\n## Item by item\n\n{STATES}\n\n{items()}\n"


if __name__ == "__main__":
    for given in sys.argv[1:]:
        copy_results(Path(given))
    for paper in PAPERS:
        (ROOT / paper / "README.md").write_text(readme(paper))
    (ROOT / "README.md").write_text(front((ROOT / "README.md").read_text()))
