"""Checks of the work of a step: the longest episode, how many trajectories are trained on, and their staleness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.finding import Finding, tried
from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.config import Config
from cusearch_async.environments import NoSearch
from cusearch_async.errors import ConfigError


def lengths(config: Config, shape: ModelShape | None) -> Finding:
    from cusearch_async.models import check_context, refuse_two_ropes  # noqa: PLC0415  (transformers only where needed)

    longest, location = config.episode.max_tokens, config.model.location
    if shape is None:
        try:
            if (Path(location) / "config.json").is_file():
                check_context(location, longest)
        except ConfigError as error:
            return Finding("error", "longest episode", str(error))
        text = (
            f"an episode can take {longest} tokens; the context and the memory of {config.model.path!r} are not known "
            "here, because its config is not on this machine (`hf download ID config.json`), or not one of a text model"
        )
        return Finding("not reachable", "longest episode", text)
    text = (
        f"{longest} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + s_max max_observation_tokens), "
        f"the context of {config.model.path!r} is {shape.context}"
    )
    if longest > shape.context:
        return Finding("error", "longest episode", f"{text}; lower one of them")
    return tried("longest episode", lambda: refuse_two_ropes(shape.config, longest, location), text)


def tokenizer(config: Config) -> tuple[Finding, Any]:
    """Whether the tokenizer can be loaded, and the tokenizer; None if it cannot."""
    from cusearch_async.models import check_files, is_local  # noqa: PLC0415  (transformers only where it is needed)

    location, names = config.model.location, ("config.json", "tokenizer_config.json")
    if not Path(location).exists():
        text = ""
        if is_local(location):
            text = f"model.path {location!r} is not on this machine; give a folder, or a Hub id like Qwen/Qwen2.5-3B"
        elif not all(isinstance(try_to_load_from_cache(location, name), str) for name in names):
            text = f"{location} is not on this machine; it will be downloaded at the start"
        if text:
            return Finding("not reachable", "tokenizer", text), None
    try:
        tokenizer = check_files(location)
    except ConfigError as error:
        return Finding("error", "tokenizer", str(error)), None
    return Finding("ok", "tokenizer", f"{len(tokenizer)} tokens in {location}"), tokenizer


def chat(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """How prompts are made with the tokenizer's chat template, and what checkpoints keep of the generation config."""
    from cusearch_async.models import generation_config, why_not_saved  # noqa: PLC0415  (transformers only where needed)
    from cusearch_async.rollout import prompting  # noqa: PLC0415  (the same)

    arguments = config.model.template_arguments
    try:
        prompting.check_template(config.environments(NoSearch()), tokenizer, arguments)
    except ConfigError as error:
        yield Finding("error", "chat template", str(error))
        return
    text = f"prompts end in {prompting.generation_prompt(tokenizer, arguments)!r} after the question"
    example = (tokenizer, prompting.EXAMPLE, arguments)
    if not prompting.is_chat(tokenizer, arguments):
        first = tokenizer.decode(prompting.first_ids(tokenizer))
        used = "none" if arguments is not None else "not used"
        yield Finding("ok", "chat template", f"{used}; prompts are plain text{f' after {first!r}' if first else ''}")
    elif prompting.render(*example) == prompting.render(*example, prompts=False):
        without = (
            "add_generation_prompt changes nothing in it, so the policy may have to write the beginning of its turns"
        )
        yield Finding("warning", "chat template", f"{without}: {text}; correct the template in the tokenizer's files")
    else:
        yield Finding("ok", "chat template", text)
    reason = why_not_saved(generation_config(config.model.location))
    if reason is not None:
        text = f"checkpoints keep only its token ids, since transformers refuses to save it: {reason}"
        yield Finding("warning", "generation_config.json", text)


def batch(config: Config) -> Iterator[Finding]:
    """How many of the generated trajectories are trained on, in how many updates, and how many are singletons."""
    settings, minibatch = config.method, config.loss.minibatch
    generated = config.questions_per_step * config.pool.rollouts
    takes_all = settings.make().uses_whole_pool
    trained = generated if takes_all else settings.budget
    text = (
        f"{settings.name} trains on {'up to ' if takes_all else 'K = '}{trained} of {generated} trajectories per step "
        f"({config.questions_per_step} questions x {config.pool.rollouts}): {-(-trained // minibatch)} updates of at "
        f"most M = {minibatch}"
    )
    if config.learner.ranks > minibatch:
        text += f"; {config.learner.ranks - minibatch} of {config.learner.ranks} ranks (learner.ranks) will be idle"
        yield Finding("warning", "batch", text)
    else:
        yield Finding("ok", "batch", text)
    if (warmup := config.learner.warmup_steps) > config.run.steps > 0:
        text = f"{warmup}, in run.steps = {config.run.steps}: the learning rate never reaches learner.lr"
        yield Finding("warning", "learner.warmup_steps", text)
    if not takes_all:
        share = sizing.singleton_share(config.questions_per_step, config.pool.rollouts, trained)
        text = (
            f"{share:.0%} of the selected trajectories are expected to be alone in their group, if depth does not "
            f"depend on the group; method.singleton = {settings.singleton!r} decides their advantage"
        )
        yield Finding("ok", "singletons", text)


def staleness(config: Config) -> Finding:
    """The expected mean, by Little's law: a trajectory that starts while F others are in flight or buffered is trained
    on F / (N G) steps later. Slow workers leave nothing buffered, so F is in flight; fast ones fill the buffer until
    admission stops them, max_staleness steps ahead of the weights."""
    rollout, most, bound = config.rollout, config.pool.max_staleness, config.pool.staleness_bound
    generated = config.questions_per_step * config.pool.rollouts
    ahead = rollout.workers * rollout.max_episodes / generated
    slow = min(most, ahead)
    never = f"never above {bound}" if config.pool.order != "oldest_complete" else "without a bound (pool.order)"
    text = (
        f"about {slow:.1f} steps if the workers are slower, {most:.1f} if the learner is slower, {never}: "
        f"{rollout.workers} x {rollout.max_episodes} episodes in flight are {ahead:.1f} "
        f"steps' worth, and {config.buffer_limit / generated:.1f} steps' worth may be buffered"
    )
    return Finding("ok", "staleness", text)
