"""Which demonstrations a step trains on, and with which settings."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cusearch_async.config import STARTER, load_config
from cusearch_async.errors import ConfigError, NonFiniteUpdate
from cusearch_async.processes.warmstart import refuse_another
from cusearch_async.run.history import WEIGHTS
from cusearch_async.run.identity import NOT_SET
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.warmstart.tuning import Course, terms, tune, tuning_config
from tests.strategies import make_trajectory

COURSES = st.builds(
    Course, batch=st.integers(1, 9), epochs=st.integers(1, 3), lr=st.just(1e-4), held_out=st.floats(0.01, 0.99)
)


@given(course=COURSES, count=st.integers(2, 40), seed=st.integers(0, 3))
def test_what_is_held_out_is_never_trained_on_and_all_else_once_an_epoch(course, count, seed):
    everything = [make_trajectory(ticket, question=f"q{ticket}?") for ticket in range(count)]
    trained, held_out = course.divide(everything, seed)
    assert trained
    assert held_out
    assert {t.ticket for t in trained} | {t.ticket for t in held_out} == set(range(count))
    assert len(trained) + len(held_out) == count
    batches = [course.batch_of(step, trained, seed) for step in range(course.steps(len(trained)))]
    assert all(1 <= len(batch) <= course.batch for batch in batches)
    seen = Counter(t.ticket for batch in batches for t in batch)
    assert seen == dict.fromkeys((t.ticket for t in trained), course.epochs)


@pytest.mark.parametrize(("questions", "siblings"), [(10, 6), (2, 30), (1, 4)])
def test_questions_are_held_out_with_all_of_their_demonstrations(questions, siblings):
    """Of a run there are several of a question: the loss of some told nothing where others were trained on."""
    places = [(question, sibling) for question in range(questions) for sibling in range(siblings)]
    everything = [make_trajectory(*place, question=f"q{place[0]}?") for place in places]
    trained, held_out = Course(8, 1, 1e-4, 0.1).divide(everything, 0)
    assert {one.question for one in trained}.isdisjoint({one.question for one in held_out})
    assert len(trained) + len(held_out) == len(everything)
    assert len(held_out) == (0 if questions == 1 else siblings)


@pytest.mark.parametrize("seed", range(10))
def test_a_question_with_most_of_the_demonstrations_is_trained_on(seed):
    places = [(0, sibling) for sibling in range(100)] + [(question, 0) for question in range(1, 101)]
    everything = [make_trajectory(*place, question=f"q{place[0]}?") for place in places]
    _, held_out = Course(8, 1, 1e-4, 0.1).divide(everything, seed)
    assert len(held_out) == 20
    assert "q0?" not in {one.question for one in held_out}


def test_one_demonstration_is_trained_on():
    trained, held_out = Course(8, 1, 1e-4, 0.5).divide([make_trajectory()], 0)
    assert (len(trained), len(held_out)) == (1, 0)


def test_the_order_is_another_in_each_epoch_and_with_each_seed():
    trained = [make_trajectory(ticket) for ticket in range(30)]
    course = Course(30, 2, 1e-4, 0.1)
    orders = {tuple(t.ticket for t in course.batch_of(step, trained, seed)) for step in (0, 1) for seed in (0, 1)}
    assert len(orders) == 4


def test_the_loss_of_a_warm_start_has_none_of_the_runs_corrections(tmp_path):
    own = load_config(
        Path("atlas"), ["--loss.kl_coef", "0.1", "--loss.entropy_coef", "0.1", "--episode.temperature", "0.7"]
    )
    config = tuning_config(own, Course(8, 1, 3e-4, 0.1), 40, tmp_path)
    assert (config.loss.kl_coef, config.loss.entropy_coef, config.loss.correction) == (0, 0, "none")
    assert (config.loss.aggregation, config.loss.minibatch, config.loss.ratio) == ("token-mean", 8, "token")
    assert config.episode.temperature == 1
    assert (config.learner.lr, config.run.steps, config.folder) == (3e-4, 40, tmp_path)


def test_a_step_that_is_not_finite_is_told_with_what_helps_a_warm_start(tmp_path):
    """It spoke of a claimed pool and of the buffer, which a warm start has not."""
    course = Course(8, 1, 3e-4, 0.1)
    config = tuning_config(load_config(Path("atlas"), []), course, 40, tmp_path)

    class Diverging:
        def update(self, batch, advantages, step):
            raise NonFiniteUpdate("step 0 is refused, not finite: the gradient")

    trained = [make_trajectory(ticket) for ticket in range(8)]
    with pytest.raises(NonFiniteUpdate, match=r"the gradient; try an --lr below 0\.0003, and another --output$"):
        tune(Diverging(), trained, [], course, config, Checkpoints(tmp_path, 3), 0, lambda: False)


def test_a_warm_start_does_not_depend_on_the_pools_of_the_run():
    """It was refused for them."""
    course = Course(8, 1, 3e-4, 0.1)
    one, other = (
        load_config(Path("atlas"), given) for given in ([], ["--pool.questions", "32", "--pool.rollouts", "6"])
    )
    assert terms(course, [], one) == terms(course, [], other)


def test_a_warm_start_of_other_weights_at_the_same_path_is_another(tmp_path):
    """It was continued, or taken as finished, when the model had been made anew."""
    folder = shutil.copytree(STARTER, tmp_path / "m")
    course, config = Course(8, 1, 3e-4, 0.1), load_config(Path("atlas"), ["--model.path", str(folder)])
    saved = terms(course, [], config)
    refuse_another(tmp_path, terms(course, [], config), saved)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    own = terms(course, [], config)
    with pytest.raises(ConfigError, match=r"weights of model.path was .*, and is .*; choose another --output"):
        refuse_another(tmp_path, own, saved)
    refuse_another(tmp_path, {**own, WEIGHTS: NOT_SET}, saved)
    refuse_another(tmp_path, own, {name: text for name, text in saved.items() if name != WEIGHTS})


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_decay", "0.25"), ("grad_clip", "0.25"), ("deepspeed.grad_accum_dtype", "bf16"), ("trained_layers", "1")],
)
def test_a_warm_start_with_another_optimizer_is_another(key, value):
    """One that was killed went on with the other settings, and a finished one was taken for theirs."""
    course = Course(8, 1, 3e-4, 0.1)
    one, other = (load_config(Path("atlas"), given) for given in ([], [f"--learner.{key}", value]))
    assert terms(course, [], one) != terms(course, [], other)
