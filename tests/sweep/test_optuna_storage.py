"""A sweep in a storage of Optuna: it shows what the sweep's directory has, and nothing else."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import refusal
from test_sweep import settings_of, tree

from raydpfl.sweep import Sweep
from raydpfl.sweep.optuna import Dashboard

optuna = pytest.importorskip("optuna")
RATES = (0.1, 0.2, 0.4)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'optuna.db'}"


def swept(url, accuracies, rates=RATES, **more):
    """A sweep over rates and two boundings, and its settings; without an accuracy: not ended."""
    spaces = {"local": {"lr": {"grid": [*rates]}}, "bounding": {"bound": {"grid": [1.0, 2.0]}}}
    sweep = Sweep.from_dict(tree(**spaces, sweep={"storage": url, **more}))
    settings = settings_of(sweep, Path(url.removeprefix("sqlite:///")).parent / "out")
    for setting, accuracy in zip(settings, accuracies, strict=False):
        for trial in setting.trials:
            trial.status = "completed"
            spent = [{"accountant": "pld", "epsilon": 3.0}, {"accountant": "rdp", "epsilon": "inf"}]
            trial.summary = {"test_accuracy": accuracy, "guarantees": spent}
    return sweep, settings


def study(url):
    return optuna.load_study(study_name="out", storage=url)


@pytest.mark.slow
def test_settings_that_are_done_are_trials_and_a_resumed_sweep_adds_what_is_missing(url, caplog):
    sweep, settings = swept(url, [0.5, 0.75])
    settings[1].trials[0].status = "failed"
    Dashboard(sweep, "out").show(settings)
    found = study(url)
    assert [(each.state.name, each.value) for each in found.trials] == [
        ("COMPLETE", 0.5),
        ("FAIL", None),
    ]
    assert found.direction.name == "MAXIMIZE" and found.metric_names == ["test_accuracy"]
    assert found.trials[0].params == {"local.lr": 0.1, "bounding.bound": 1.0}
    facts = found.trials[0].user_attrs
    assert facts["epsilon_pld"] == 3.0 and "epsilon_rdp" not in facts and facts["seeds"] == [3]
    sweep, settings = swept(url, [0.5, 0.75, 0.6])
    settings[1].trials[0].status = "failed"
    again = Dashboard(sweep, "out")
    again.show(settings)
    again.show(settings, is_over=True)
    assert [each.value for each in study(url).trials] == [0.5, None, 0.6]
    assert not caplog.records


@pytest.mark.slow
def test_a_study_that_disagrees_is_written_anew_from_the_directory(url, caplog):
    for accuracies, rates, warnings in (
        ([0.5, 0.75], RATES, 0),
        ([0.5, 0.8], RATES, 1),  # another result
        ([0.5, 0.8], (0.1, 0.4), 0),  # other values that are not tried yet
        ([0.9], (0.3,), 1),  # no setting in common
    ):
        caplog.clear()
        sweep, settings = swept(url, accuracies, rates)
        Dashboard(sweep, "out").show(settings, is_over=True)
        assert [each.value for each in study(url).trials] == accuracies
        assert len(caplog.records) == warnings


@pytest.mark.slow
def test_a_study_has_the_settings_of_a_list_of_texts_that_was_extended(url, caplog):
    for kinds in (["sgd", "adam"], ["sgd", "adam", "yogi"]):
        sweep = Sweep.from_dict(tree(server={"kind": {"grid": kinds}}, sweep={"storage": url}))
        settings = settings_of(sweep, Path(url.removeprefix("sqlite:///")).parent / "out")
        for setting in settings:
            for trial in setting.trials:
                trial.status = "completed"
                trial.summary = {"test_accuracy": 0.5, "guarantees": []}
        Dashboard(sweep, "out").show(settings)
        assert [each.params["server.kind"] for each in study(url).trials] == kinds
    assert [each.getMessage().rpartition(" and ")[2] for each in caplog.records] == ["is replaced"]


@pytest.mark.slow
def test_another_study_of_the_name_and_a_storage_that_cannot_be_opened_are_refused(url, tmp_path):
    optuna.create_study(study_name="out", storage=url)
    sweep, _ = swept(url, [])
    with refusal("without another study named out"):
        Dashboard(sweep, "out")
    optuna.delete_study(study_name="out", storage=url)
    Dashboard(sweep, "a/out")
    with refusal("without another study named out"):
        Dashboard(sweep, "b/out")
    Dashboard(sweep, "b/out", has_begun=True)  # moved
    tree = {**sweep.tree, "rounds": 3, "seed": 9}
    with refusal("without another study named out"):
        Dashboard(replace(sweep, tree=tree), "b/out")
    for wrong in (f"sqlite:///{tmp_path}/no/such.db", "nonsense", "postgresql+none://x"):
        sweep, _ = swept(wrong, [])
        with refusal(r"sweep.storage = .* that Optuna can open \("):
            Dashboard(sweep, "out")


def test_a_storage_that_fails_on_the_way_is_one_warning(url, caplog, monkeypatch):
    sweep, settings = swept(url, [0.5])
    mirror = Dashboard(sweep, "out")
    monkeypatch.setattr(mirror._study, "add_trial", lambda trial: 1 / 0)
    mirror.show(settings)
    mirror.show(settings)
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == 1 and "ZeroDivisionError" in said[0] and "continues without it" in said[0]
