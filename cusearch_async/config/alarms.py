"""What happens when an alarm begins (`alarms.RULES`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import field_validator

from cusearch_async.alarms.rules import RULES
from cusearch_async.config.section import Free, Section, asked_url, nearest
from cusearch_async.extensions import Names, refuse_unsplit


class AlarmsConfig(Section):
    stop_on: Free[Names] = ()
    """Alarms that end the run, at its newest checkpoint; of those in `cusearch alarms --rules`."""
    command: Free[Names] = ()
    """A command and its arguments, run when an alarm begins, or an error in its steps ends the run (run_ended);
    {name}, {text}, {run} and {step} are filled in."""
    url: Free[Annotated[str, asked_url("http://127.0.0.1:9000/alarms")] | None] = None
    """Where the same is posted, as JSON."""

    @field_validator("stop_on")
    @classmethod
    def _are_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [rule.name for rule in RULES]
        for name in names:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near}?" if near else f"use some of {', '.join(known)}"
                raise ValueError(f"{name!r} is no alarm; {hint}")
        return names

    @field_validator("command")
    @classmethod
    def _can_be_filled_in(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        refuse_unsplit(words, "notify-send,{text}")
        for word in words:
            try:
                word.format(name="", text="", run="", step=0)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"{word!r} cannot be filled in; use {{name}}, {{text}}, {{run}} and {{step}}, and {{{{ for a brace"
                ) from error
        return words
