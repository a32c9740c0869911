"""A rank of the learner that does what it is told, a word a line, in the file WORDS or its input (test_ranks.py)."""

from __future__ import annotations

import fileinput
import json
import logging
import os
import sys
from typing import Any

from cusearch_async.lifecycle.placement import configure_process

MESSAGES = 200


def said(**facts: Any) -> None:
    """In one piece: ranks under torchrun share what they write to."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:  # noqa: PLR0912  (one for each word)
    configure_process([])
    import torch

    from cusearch_async.errors import RanksFailed
    from cusearch_async.learner.ranks import Ranks

    logging.basicConfig(level=logging.WARNING)
    ranks = Ranks(float(os.environ.get("TIMEOUT_S", "60")))
    said(ready=ranks.rank, sum=ranks.sum(torch.ones(1)).item(), gathered=ranks.gather(str(ranks.rank)))
    # rank 0 is told by the test what to do, the others by rank 0
    for line in fileinput.input(os.environ.get("WORDS", "-"), encoding="utf-8"):  # noqa: SIM115
        word = line.strip()
        if word == "tell":
            for number in range(MESSAGES):
                ranks.tell(b"message %d" % number)
                ranks.sum(torch.ones(1))  # as after each command of the learner
            said(told=MESSAGES)
        elif word == "tell one":
            ranks.tell(b"message")
        elif word.startswith("tell MiB"):
            for mib in map(int, word.split()[2:]):
                ranks.tell(b"%d" % (mib % 10) * (mib << 20))
                ranks.sum(torch.ones(1))
        elif word.startswith("listen to"):
            large = []
            for _ in range(int(word.split()[2])):
                message = ranks.listen()
                large.append([len(message) / 2**20, len(set(message)), message[:1].decode()])
                ranks.sum(torch.ones(1))
            said(large=large)
        elif word == "listen":
            heard = []
            for _ in range(MESSAGES):
                heard.append(ranks.listen().decode())
                ranks.sum(torch.ones(1))
            said(heard=heard)
        elif word == "meet":
            try:
                with ranks.meeting():
                    ranks.sum(torch.ones(1))
            except RanksFailed as error:
                said(failed=str(error))
        elif word == "answers":
            try:
                ranks.wait_for_answers("of nobody")
            except RanksFailed as error:
                said(failed=str(error))
        elif word == "silent":
            said(silent=ranks.silent(1.5))
        elif word == "wait":
            ranks.listen()
        elif word == "die":
            os._exit(0)
        else:
            break
    ranks.close()


if __name__ == "__main__":
    main()
