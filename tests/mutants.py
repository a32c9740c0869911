"""Planted bugs: each is one line changed in a module, and the tests of that module must find it.

`make mutants` runs it. It tests the tests, so it is needed where these or the algorithm change, and not every time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW
from tests.planted_in_agents import AGENTS
from tests.planted_in_scripts import SCRIPTS, lua
from tests.planted_in_weights import WEIGHTS as TRAVELLING

ROOT = Path(__file__).parents[1]

SDGA, PHASE = (("algorithm/methods/sdga.py", tests) for tests in ("test_sdga.py", "test_methods.py"))
AR3PO, VISITS = (("algorithm/methods/ar3po.py", tests) for tests in ("test_ar3po.py", "test_methods.py"))
CONTROLS, STRATIFIED = ((f"algorithm/methods/{name}.py", "test_controls.py") for name in ("controls", "baselines"))
RECORDING, REPLAYING = (("training/recorder.py", "test_recorder.py"), ("replay/selection.py", "test_recorder.py"))
AGAIN, PROVENANCE = ("replay/update.py", "test_replayed_update.py"), ("run/provenance.py", "test_history.py")
STATISTICS, PROBING = ("study/statistics.py", "test_statistics.py"), ("evaluation/probing.py", "test_probing.py")
FINDINGS, EVALUATED = ("evaluation/findings.py", "test_findings.py"), ("cli/eval.py", "test_evaluated.py")
JUDGE = ("evaluation/judge.py", "test_judge.py")
SCORING, LOCAL = ("evaluation/scoring.py", "test_scoring.py"), ("retrieval/indexing.py", "test_server.py")
RUNNING, VARIANTS = ("study/running.py", "test_report.py"), ("study/variants.py", "test_report.py")
LAUNCHED, STUDY = ("study/running.py", "test_running.py"), ("study/plan.py", "test_plan.py")
SIDES = ("study/plan.py", "test_claims.py")
CLAIMS, GROWTH = (("study/claims.py", "test_claims.py"), ("study/statistics.py", "test_claims.py"))
BASELINES, POOLED = ((f"algorithm/{name}.py", "test_methods.py") for name in ("methods/baselines", "advantages"))
ADVANTAGES, LOSSES = ("algorithm/advantages.py", "test_advantages.py"), ("algorithm/losses.py", "test_losses.py")
ANSWERS, REWARDS = ("algorithm/answers.py", "test_answers.py"), ("environments/search.py", "test_reward.py")
PLAYER, OWN = ("rollout/episode.py", "test_episode.py"), ("environments/base.py", "test_own.py")
TICKETS, BATCHING = ("algorithm/tickets.py", "test_tickets.py"), ("learner/batching.py", "test_batching.py")
PLAN, UPDATE = (("learner/plan.py", "test_plan.py"), ("learner/update.py", "test_update.py"))
MODEL, MATMUL = ("learner/model.py", "test_model.py"), ("learner/matmul.py", "test_matmul.py")
SUITABLE, BESIDE = ("learner/suitability.py", "test_suitability.py"), ("study/plan.py", "test_report.py")
ENGINE = ("learner/deepspeed_engine.py", "test_optimizer.py")
ATTENTION, LEADING = ("learner/attention.py", "test_attention.py"), ("training/takeover.py", "test_takeover.py")
BEAT, THREAD = (("training/heartbeat.py", "test_heartbeat.py"), ("training/background.py", "test_heartbeat.py"))
LOOP, PUBLISHING = (("training/loop.py", "test_train.py"), ("training/publisher.py", "test_train.py"))
TENSORS, WEIGHTS = ("weights/tensor_file.py", "test_tensor_file.py"), ("weights/folder.py", "weights/test_folder.py")
FRESHNESS, GPUS = ("rollout/staleness_check.py", "test_staleness_check.py"), ("lifecycle/gpus.py", "test_gpus.py")
GPU_SHARE, CANARY = ("lifecycle/gpu_share.py", "test_gpu_share.py"), ("learner/canary.py", "test_canary.py")
WAITING, HTTP = ("rollout/loop.py", "test_waiting.py"), ("weights/http.py", "weights/test_http.py")
CHECKS, LIMITS = ("transport/limits.py", "test_claims.py"), ("transport/limits.py", "test_interface.py")
MEMORY, TURN = ("transport/memory.py", "test_claims.py"), ("rollout/turn.py", "test_turn.py")
STARTS, OWNER = ("run/history.py", "test_history.py"), ("training/takeover.py", "test_takeover.py")
LOADING, LORA = ("rollout/weight_loader.py", "test_weight_loader.py"), ("learner/adapter.py", "test_adapter_layers.py")
USABLE, STEP = ("study/variants.py", "test_usable.py"), ("metrics/step.py", "test_metrics.py")
SERVED = ("retrieval/client.py", "test_served.py")
PACE = ("retrieval/pace.py", "test_pace.py")
TERMS, SCOPES = ("run/identity.py", "test_identity.py"), ("config/keys.py", "test_scopes.py")


MUTANTS = {
    "packed trajectories see each other": (ATTENTION, "if packed is None else list(packed.lengths)", "or []"),
    "the kernel sees the future": (ATTENTION, '"window_size": (-1, 0)', '"window_size": (-1, -1)'),
    "a sliding window is not seen": (ATTENTION, "if window and window < config.max_position_embeddings", "if False"),
    "padded rows see the future": (ATTENTION, "is_causal=True", "is_causal=False"),
    "spare is not guarded": (SDGA, "if spare > 0:", "if spare != 0:"),
    "overflow goes back to the farthest": (SDGA, "order[:place][::-1]", "order[:place]"),
    "overflow goes only to later buckets": (SDGA, "order[place + 1 :] + order[:place][::-1]", "order[place + 1 :]"),
    "ties are served deeper first": (SDGA, "key=lambda s: priorities[s]", "key=lambda s: (priorities[s], -s)"),
    "the phase wants more than K": (SDGA, "[phase + 2 :]) >= budget else", "[phase + 2 :]) > budget else"),
    "the phase counts its own bucket": (SDGA, "capacities[phase + 2 :]) >=", "capacities[phase + 1 :]) >="),
    "sampling is not seeded": (SDGA, "rng.random(len(depths))", "np.random.default_rng().random(len(depths))"),
    "sampling takes the first": (SDGA, "order = rng.random(len(depths))", "order = np.arange(len(depths))"),
    "the reserve serves the shallowest first": (SDGA, "range(s_max, phase + 1, -1)", "range(phase + 2, s_max + 1)"),
    "the trap is seen at the last phase": (SDGA, "phase < len(capacities) - 2 and", "phase < len(capacities) - 1 and"),
    "the phase is checked after the selection": (PHASE, "budget, phase, reserve)", "budget, memory.phase, reserve)"),
    "the phase is not kept": (PHASE, "memory=SdgaMemory(phase)", "memory=memory"),
    "equal rewards go to the first": (BASELINES, "rng.permutation(len(pool.rewards))", "np.arange(len(pool.rewards))"),
    "DAPO compares with zero": (POOLED, "spread[group] >= EQUAL", "spread[group] > 0"),
    "AR3PO counts rewards as passed": (VISITS, "np.add.reduceat(pool.passed,", "np.add.reduceat(pool.rewards > 0,"),
    "GRPO-Half generates everything": (BASELINES, "return self.budget // rollouts", "return questions"),
    "a raw singleton gets nothing": (ADVANTAGES, '"raw":\n        return reward', '"raw":\n        return 0 * reward'),
    "a zero singleton gets something": (ADVANTAGES, 'if rule == "zero" or np.ptp', "if np.ptp"),
    "the deviation is the population's": (
        ADVANTAGES,
        "deviations / (group.std(ddof=1)",
        "deviations / (group.std(ddof=0)",
    ),
    "zero variance is tested by deviation": (ADVANTAGES, "elif np.ptp(group) < EQUAL:", "elif group.std() == 0:"),
    "token-mean divides by trajectories": (LOSSES, "[1 / sum(lengths)]", "[1 / len(lengths)]"),
    "sequence means are not averaged": (LOSSES, "1 / (len(lengths) * length)", "1 / length"),
    "the sum is normed by its own length": (LOSSES, "* max_tokens)]", "* max(lengths))]"),
    "the penalty is subtracted": (LOSSES, "per_token + settings.kl_coef * kl", "per_token - settings.kl_coef * kl"),
    "the entropy bonus is a penalty": (LOSSES, "per_token - settings.entropy", "per_token + settings.entropy"),
    "the clip is pessimistic the wrong way": (LOSSES, "torch.minimum(ratio * adv", "torch.maximum(ratio * adv"),
    "the dual clip binds good tokens": (LOSSES, "where(advantages < 0, torch", "where(advantages != 0, torch"),
    "the penalty's weight is corrected too": (
        LOSSES,
        "= tokens.aggregation * per_token",
        "= tokens.aggregation * tokens.weights * per_token",
    ),
    "the age counts one too many": (LOSSES, "(age / (age + 1))", "((age + 1) / (age + 2))"),
    "the geometric mean is of the whole micro-batch": (LOSSES, "sequence_mean(log_w, lengths)", "log_w.mean()"),
    "the geometric correction has no floor": (LOSSES, "(mean >= low) & (mean <= high)", "mean <= high"),
    "icepop keeps what is small": (LOSSES, "else (w >= low) & (w <= high)", "else w <= high"),
    "tis does not truncate": (LOSSES, 'tis":\n        return torch.clamp(w, max=high)', 'tis":\n        return w'),
    "every step is divided alike": (PLAN, "config.run.seed, step)", "config.run.seed, 0)"),
    "the longest episode lacks its last turn": (PLAN, "(config.episode.s_max + 1)", "config.episode.s_max"),
    "a filler is trained on": (PLAN, "is_filler=share.is_filler", "is_filler=False"),
    "a rank calls forward less often": (PLAN, "range(most - len(own))", "range(0)"),
    "of identical rows one alone counts": (PLAN, "for number in copies]", "for number in copies[:1]]"),
    "a copy has the log-probabilities of another row": (PLAN, "end - one.sampled_tokens, end", "one.sampled_tokens"),
    "what has an advantage has no gradient": (PLAN, "np.any(advantages[same])", "np.all(advantages[same])"),
    "without a gradient no optimizer step": (PLAN, "divided[True].append(shortest)", "divided[False].append(shortest)"),
    "a KL penalty is no reason for a gradient": (PLAN, "and not loss.kl_coef and", "and"),
    "π_prox is that of the second mini-batch": (UPDATE, "self.plan.minibatches[1:]", "self.plan.minibatches[:-1]"),
    "every mini-batch is its own π_prox": (UPDATE, "if micro in self._first:", "if True:"),
    "a row is dropped by the cut": (BATCHING, "order[start:end]", "(order[start : end - 1] or order[start:end])"),
    "the cut pads more than it must": (BATCHING, "end_of[start] = min(possible", "end_of[start] = max(possible"),
    "all go to the first rank": (BATCHING, "tokens.index(min(tokens))", "tokens.index(max(tokens))"),
    "what the environment wrote does not tell rows apart": (BATCHING, ", rows[number].sampled.tobytes()", ", b''"),
    "rows beyond the last piece are dropped": (MATMUL, "slice(whole, count)", "slice(count, count)"),
    "a product by oneDNN is not tried first": (MATMUL, " or largest_error() > _FLOAT32_ERROR", ""),
    "each refusal of a burst counts": (PACE, "if now >= self._not_before:", "if True:"),
    "a server's pause is not kept": (PACE, "if wanted_s is None", "if True"),
    "siblings are torn apart": (BATCHING, "of_ticket.setdefault(ticket, [])", "of_ticket.setdefault(index, [])"),
    "every rank does what rank 0 does": (PLAN, "return per_rank[rank]", "return per_rank[0]"),
    "advantages go to others": (PLAN, "spread(advantages[of_chosen]", "spread(advantages[: len(of_chosen)]"),
    "a micro-batch has one weight": (PLAN, "(weights[of_chosen]", "(weights[of_chosen * 0 + of_chosen[0]]"),
    "infinity is taken for finite": (UPDATE, "~torch.isfinite(values)", "torch.isnan(values)"),
    "π_prox is not checked": (UPDATE, "self._checked(PROXIMAL, log_probs)", "log_probs"),
    "a gradient of NaN is finite": (UPDATE, "~torch.isfinite(gradient)", "torch.isinf(gradient)"),
    "a micro-batch waits for the device": (UPDATE, "log_prox = log_policy\n", "log_prox = log_policy.cpu()\n"),
    "a token is predicted from itself": (MODEL, "[sampled - 1]", "[sampled]"),
    "AR3PO's history has no window": (AR3PO, "(passed, rollouts))[-WINDOW:]", "(passed, rollouts))"),
    "AR3PO's rate is not smoothed": (AR3PO, "Fraction(1 + passed, 2 + rollouts)", "Fraction(passed, max(rollouts, 1))"),
    "AR3PO's rounding loses rollouts": (AR3PO, "shares[i] += 1", "shares[i] += 0"),
    "passages are judged": (REWARDS, 'segments if s.author == "model" for match', "segments for match"),
    "the first answer counts": (REWARDS, "blocks[-1].strip()", "blocks[0].strip()"),
    "F1 forgets how often a word comes": (
        ANSWERS,
        "(Counter(found) & Counter(gold))",
        "(Counter(set(found)) & Counter(set(gold)))",
    ),
    "yes may be a part of an answer": (ANSWERS, "{prediction, answer} & _WHOLE_ANSWERS", "False"),
    "a sign is no part of a number": (ANSWERS, r"(?<!\w)-?\.?", r"(?<!\w)\.?"),
    "English is read by other rules than SQuAD's": (ANSWERS, "elif _NOT_LATIN.search(text) or", "elif True or"),
    "the other text's script does not count": (ANSWERS, "or _NOT_LATIN.search(other):", "or False:"),
    "tickets are granted beyond the last pool": (lua("admit"), "math.min(pools, run.steps)", "pools"),
    "the last pool is one too early": (lua("admit"), "math.min(pools, run.steps)", "math.min(pools, run.steps - 1)"),
    "completion order ends at the last pool": (lua("admit"), "if by_tickets then", "if true then"),
    "a requeued ticket ignores the staleness bound": (lua("admit"), "'(' .. limit, 'LIMIT'", "'+inf', 'LIMIT'"),
    "a requeued ticket that does not fit is lost": (lua("admit"), "  if not has_room then break end\n", ""),
    "a key has another name than in the scripts": (("transport/keys.py", "test_keys.py"), '"owner"', '"owners"'),
    "a script spells a key in its own way": (lua("commit", "keys"), "key('next_ticket')", "key('ticket')"),
    "an admission ignores the contract": (lua("admit", "run_contract"), "if refused then return refused end", ""),
    "a put ignores the contract": (lua("put", "run_contract"), "(contract_refusal(ARGV[1]) or w", "(nil or w"),
    "a refused put leaves its payload": (
        lua("put", "run_contract"),
        "redis.call('UNLINK', key('staged:' .. cmsgpack",
        "string.len(key('staged:' .. cmsgpack",
    ),
    "a heartbeat ignores the contract": (lua("heartbeat", "run_contract"), "if refused then return refused end", ""),
    "a learner with another contract takes over": (
        lua("recover", "run_contract"),
        "if another_contract and not accepts_changes then",
        "if false then",
    ),
    "a change that is accepted is refused": (lua("recover", "run_contract"), "and not accepts_changes then", "then"),
    "an accepted contract is lost": (lua("recover", "run_contract"), "in pairs(own.terms) do", "in pairs({}) do"),
    "terms of the old contract stay": (lua("recover", "run_contract"), "('limits'), key('contract'))", "('limits'))"),
    "a recovery resizes what is granted": (lua("recover"), "state(method, granted)", "state(method, 0)"),
    "the order of the questions does not count": (
        TERMS,
        "for question in questions]",
        "for question in sorted(questions, key=lambda q: q.id)]",
    ),
    "another folder is the same run": (TERMS, "if own.folder and run.run_id and", "if False and"),
    "a retriever that was not asked is another": (TERMS, "else own.with_retriever(run.terms[SERVED])", "else own"),
    "any checkpoint is loaded": (("training/checkpoint.py", "test_checkpoint.py"), "    if found:", "    if False:"),
    "the answers do not count": (TERMS, "question.answers, question.environment)", "question.environment)"),
    "the special tokens do not count": (TERMS, "special, getattr(tokenizer", "getattr(tokenizer"),
    "a resent grant is given twice": (lua("admit", "buffer"), "'admit_token') == token", "'admit_token') == 0"),
    "a resent grant ignores the staleness bound": (lua("admit", "buffer"), "if tonumber(ticket) < limit", "if true"),
    "an older admission takes leases": (lua("admit", "buffer"), "is_overtaken(worker, token)", "false"),
    "attempts are without number": (lua("common"), "ticket, 1) < run.max_attempts then", "ticket, 1) < 1000 then"),
    "a closed group stays leased": (lua("common"), "close_group(ticket)\n  end_lease(ticket)", "close_group(ticket)"),
    "a requeued group stays ready": (lua("common", "buffer"), "  redis.call('ZREM', key('ready'), ticket)\n", ""),
    "an outage ends leases": (lua("common", "buffer"), "math.floor(run.lease_ms / 2))", "math.huge)"),
    "a clock that is set back goes back": (lua("common", "buffer"), "math.max(0, passed)", "passed"),
    "a lost run looks taken over": (
        lua("common", "claims"),
        "return lost('the keys of the run are missing')",
        "return redis.error_reply('FENCED')",
    ),
    "what is lost is not counted": (lua("common", "claims"), "count('lost', 1)", ""),
    "what is lost stays in the bytes": (lua("common", "claims"), "count('bytes', -bytes)", ""),
    "a full buffer takes everything": (lua("put"), "if is_full and", "if false and is_full and"),
    "a late put is taken": (lua("put"), "    count('late_refused', 1)\n    return 'late'\n", ""),
    "a dropped payload is stored": (lua("put", "buffer"), "redis.call('EXISTS', staged) == 0", "false"),
    "a pool is claimed twice": (lua("claim"), "redis.call('EXISTS', pool_info_key(step)) == 1", "false"),
    "an old learner may claim": (lua("claim"), "if refused then return refused end", ""),
    "what has gone is not missed": (lua("claim", "claims"), "waiting[i] and is_whole(id)", "waiting[i]"),
    "a short group is claimed": (lua("claim", "claims"), "    fail_attempt(ticket)\n    again[", "    again["),
    "a claim of a later step waits": (lua("claim"), "if step ~= run.step then", "if step < run.step then"),
    "tickets that are nowhere are waited for": (lua("claim", "damage"), "      requeue(name)\n", ""),
    "the attempts are forgotten before the claim": (
        lua("common", "claims"),
        "  redis.call('ZADD', key('ready'), ticket, ticket)\n",
        "  redis.call('ZADD', key('ready'), ticket, ticket)\n  redis.call('HDEL', key('attempts'), ticket)\n",
    ),
    "a commit forgets the unselected": (lua("commit"), "count('unselected', #ids - selected)", ""),
    "an announcement goes back": (lua("announce", "claims"), "if run.announced_by == run.epoch and", "if false and"),
    "recovery leaves the trained pools trained": (lua("recover"), "count('claimed', pool.size)", "count('claimed', 0)"),
    "a recovery is done twice": (lua("recover", "buffer"), "if given then return tonumber(given) end", ""),
    "another run takes over": (lua("recover", "run_contract"), "if own.folder ~= '' and", "if false and"),
    "an epoch goes back": (lua("recover"), "math.max(run.epoch or 0, least_epoch)", "(run.epoch or 0)"),
    "a worker's pools may be others": (lua("recover", "claims"), "granted > 0 and run[name]", "false"),
    "what the learner is past stays": (lua("recover", "claims"), "if step > reached then", "if false then"),
    "recovery fails by halves": (lua("recover", "damage"), "found ~= 'none' and found ~= kind", "false"),
    "nothing is counted again": (lua("recover", "damage"), "redis.call('UNLINK', key('depth_by_version'))", ""),
    "a quarantined one counts in its group": (lua("quarantine", "operators"), "- #missing(ticket)", ""),
    "a quarantined one is not generated again": (lua("quarantine", "claims"), "    fail_attempt(ticket)\n", ""),
    "the quarantine grows for ever": (lua("quarantining", "buffer"), "> 1000 then", "> 10000 then"),
    "a checkpoint forgets one pool too many": (lua("checkpoint"), "checkpoint, step - 1 do", "checkpoint, step do"),
    "the staleness is not checked": (CHECKS, "staleness > self.max_staleness", "False"),
    "the future is not checked": (CHECKS, "or newest > step", ""),
    "the group's question is not checked": (CHECKS, "if len(questions[t.ticket]) > 1:", "if False:"),
    "the ticket's question is not checked": (CHECKS, "if question_of is not None and", "if False and"),
    "the vocabulary is not checked": (LIMITS, "and highest >= self.vocab_size", "and False"),
    "the depth is not checked": (CHECKS, "            self.check(t)\n", "            pass\n"),
    "an empty gold answer is contained": (ANSWERS, "if not gold:", "if False:"),
    "a search of the last turn is executed": (PLAYER, "if turn_number == settings.s_max:", "if False:"),
    "turns that are not counted add tokens": (PLAYER, "            if observation.counts:\n", "            if True:\n"),
    "a reward of one's own is ignored": (OWN, "if reward is None:", "if True:"),
    "an environment gets the tickets of another": (TICKETS, "self._shares[part] + earlier", "self._shares[part]"),
    "environments come in blocks": (TICKETS, "(2 * n + 1) / (2 * share), part, n", "part, part, n"),
    "a checkpoint that is deleted meanwhile is loaded": (LEADING, "(latest and latest.path) !=", "None and"),
    "another run is taken over": (LEADING, "await buffer.check_identity(self._accepts_changes)", "pass"),
    "the folder's epochs are not asked for": (LEADING, "start.method, least_epoch,", "start.method, 0,"),
    "the run is nobody's": (LEADING, "= identity.in_folder(config.folder)", "= identity"),
    "the other ranks are left waiting": (LEADING, "            learner.stop(is_finished)\n", "            pass\n"),
    "a cleared checkpoint is a full disk": (LEADING, "if isinstance(error, WriteFailed):", "if False:"),
    "what fails behind the loop is not noticed": (LOOP, "            work.check()\n", "            pass\n"),
    "weights stay lent after a failure": (PUBLISHING, "            lent.release()\n", ""),
    "weights stay lent when the disk is full": (WEIGHTS, "lent.callback(copied)", "pass"),
    "tensors are not aligned": (TENSORS, "(-tensors[name].element_size(), name)", "name"),
    "a tensor may lie beyond its file": (TENSORS, "if place.end > size:", "if False:"),
    "stale weights are fresh": (FRESHNESS, "if digests == before.digests.get(name)", "if False"),
    "a fused tensor is not judged": (FRESHNESS, "if module else [name]", "if False else [name]"),
    "a port is not waited for": (HTTP, "asyncio.get_running_loop().time() > deadline", "True"),
    "any token opens the weights": (HTTP, "if not has_token(", "if False and has_token("),
    "any file can be downloaded": (HTTP, "if file not in FILES or not path.is_file():", "if not path.is_file():"),
    "the last version is not waited for": (HTTP, "self.sending or self.asking", "self.sending and self.asking"),
    "who does not come back is waited for": (HTTP, "now - max(heard, self._sent_at) < SILENCE_S", "True"),
    "half a group is taken": (GPUS, "if all(_lock(gpu", "if any(_lock(gpu"),
    "the learner's GPUs are the engines'": (GPUS, "() if together else learner\n", "()\n"),
    "a worker joins a learner without a share": (GPUS, "if shared and gpu not in free", "if gpu not in free"),
    "the learner has the GPUs beside the engines": (GPU_SHARE, "fcntl.LOCK_EX if role", "fcntl.LOCK_SH if role"),
    "a requeued ticket wakes nobody": (lua("common"), "  tell()\nend", "end"),
    "announced weights wake nobody": (lua("announce"), "tell()\n", ""),
    "a learner that takes over wakes nobody": (lua("recover"), "tell()\n", ""),
    "the run is asked for tickets that it has not": (WAITING, "room <= 0 or not self._may_grant", "room <= 0"),
    "an ended episode wakes nobody": (WAITING, "task]\n        self._change.set()", "task]"),
    "news wake nobody": (WAITING, "self._may_grant = True\n            self._change.set()", "pass"),
    "strata hold all questions": (STRATIFIED, "pool.tickets[selected] * (pool.s_max + 1) + pool", "0 + pool"),
    "strata are blended the other way": (STRATIFIED, "weight * within", "(1 - weight) * within"),
    "one sibling too many": (CONTROLS, "place < wanted[group]", "place <= wanted[group]"),
    "siblings are the first": (CONTROLS, "np.lexsort((rng.random(len(group)), group))", "np.arange(len(group))"),
    "a control has as many trajectories": (CONTROLS, "order[:count]", "order[: len(followed.indices)]"),
    "records are never deleted": (RECORDING, "if total <= self._most_bytes:", "if True:"),
    "records of another course count": (RECORDING, "if counts(step + 1, epoch, starts)", "if True"),
    "a record ends the run": (RECORDING, "except (OSError, WriteFailed) as", "except KeyError as"),
    "a record that is gone ends the run": (RECORDING, "except FileNotFoundError:", "except KeyError:"),
    "another method has half of its pool": (REPLAYING, "if own != recorded:", "if False:"),
    "one rank stands for several": (REPLAYING, "if learner.ranks > 1:", "if False:"),
    "weights of another run are compared": (AGAIN, ".folder or run_folder", ".folder or step.config.folder"),
    "nothing is compared": (AGAIN, "if not metrics and differing is None:", "if False:"),
    "metrics of another epoch are compared": (AGAIN, 'if row["epoch"] == record.epoch', "if True"),
    "weights of another epoch are compared": (AGAIN, "newest is None or epoch_of(newest) < epoch", "newest is None"),
    "weights have no checksum": (PROVENANCE, "fingerprint_of_file(path)) for", "0) for"),
    "a replay forgets": (REPLAYING, "self.record.memory if method.Memory is of_record.Memory else", '"" if True else'),
    "questions do not count in an error": (STATISTICS, "max(parts @ [1, 1, -1], *parts[:2])", "parts[0]"),
    "seeds do not count in an error": (STATISTICS, "max(parts @ [1, 1, -1], *parts[:2])", "parts[1]"),
    "few seeds are as good as many": (STATISTICS, "stats.t.ppf((1 + LEVEL) / 2, self.freedom)", "1.96"),
    "no data is a find": (STATISTICS, "[1.0 if one.p is None", "[0.0 if one.p is None"),
    "what is detectable ignores Holm": (STATISTICS, "(1 - LEVEL) / 2 / tests", "(1 - LEVEL) / 2"),
    "a new default makes all runs new": (STUDY, "mode=\"json\", exclude_defaults=True", "mode=\"json\""),
    "any of several runs stands for a side": (SIDES, "if max(seeds.values(), default=0) > 1:", "if False:"),
    "other questions are compared": (SIDES, "if any(one != asked[0] for one in asked):", "if False:"),
    "a baseline may be no run": (STUDY, "not any(has(run, baseline) for", "not any(True for"),
    "blocked evidence is shown": (PROBING, "strict=True) if not evidence]", "strict=True)]"),
    "a closed book is open": (PROBING, 'if self.mode == "closed":', "if False:"),
    "recall is carried over": (PROBING, "found, self._found = self._found, {}", "found = self._found"),
    "a title hides the evidence": (PROBING, "or shown_body == whole", "or False"),
    "all passes are played with the engine": (PROBING, "search.mode = one.mode", 'search.mode = "full"'),
    "questions of unknown evidence count": (FINDINGS, "if question.evidence]", "if question.evidence != ()]"),
    "a leak is judged of evidence that was never seen": (FINDINGS, "if not taken and not", "if False and not"),
    "who is harmed is helped": (FINDINGS, "'helps' if gain.difference > 0", "'helps' if True"),
    "one question is proof": (FINDINGS, "(only_first + 1) / (a.size + 2)", "only_first / a.size"),
    "what is always wrong is known by heart": (FINDINGS, "known.low > _KNOWS and", "True and"),
    "closed and blocked are swapped": (EVALUATED, '("full", "closed", "blocked")', '("full", "blocked", "closed")'),
    "a probe counts as a sample": (EVALUATED, "results[len(modes) :]", "results[len(modes) - 1 :]"),
    "a judge's failure loses the scores": (EVALUATED, "except* JudgeFailed as group", "except* ConfigError as group"),
    "what is not read is wrong": (JUDGE, "if is_right is not None]", "if True]"),
    "a version is scored before it is there": (SCORING, "if following > state.published:", "if False:"),
    "a version is skipped in order": (SCORING, "(scored // every + 1) * every", "(scored // every + 2) * every"),
    "equal queries differ": (LOCAL, "query.seed if self.settings.stochastic else", "query.seed if True else"),
    "a run that lacks a step is done": (("study/tables.py", "test_running.py"), "if len(rows) != steps or", "if"),
    "a failed run is made again unasked": (RUNNING, '{"failed"} if retry_failed else set()', '{"failed"}'),
    "a launch begins beside the one before": (LAUNCHED, "    _wait_until_free(where, ", "    str("),
    "an interrupted run begins anew": (LAUNCHED, "    _wait_until_free(where, ", "    shutil.rmtree(where, "),
    "earlier attempts took no time": (LAUNCHED, "before, began = _seconds_before(where),", "before, began = 0.0,"),
    "an earlier line is the reason": (LAUNCHED, "why_it_ended(output, seen)", "why_it_ended(output)"),
    "a failed seed is in the mean": (VARIANTS, 'if status == "done"]', "]"),
    "seeds that one lacks are compared": (VARIANTS, "& {run.seed for run in others}", "| {run.seed for run in others}"),
    "seeds need not say it": (STATISTICS, "(crossed, Spread(math.sqrt(parts[0]), seeds - 1.0))", "(crossed,)"),
    "seeds that failed are no matter": (CLAIMS, "if lost:", "if False:"),
    "what was reported of one setting is shown in all": (CLAIMS, "has(runs[0], one.where)", "True"),
    "runs beside a part differ in anything": (BESIDE, "if key not in part.settings]", "if key in part.settings]"),
    "a model that scales its logits is trained": (SUITABLE, "if apart > _APART[model.dtype]:", "if False:"),
    "a model that carries a state is packed": (SUITABLE, "if seen > _SEEN[model.dtype]:", "if False:"),
    "gradients are not clipped": (ENGINE, '"gradient_clipping": learner.grad_clip', '"gradient_clipping": 1e9'),
    "weights do not decay": (ENGINE, '"weight_decay": learner.weight_decay', '"weight_decay": 0.0'),
    "an offloaded optimizer is slow": (ENGINE, '("offload_optimizer") == "cpu"', '("offload_optimizer") == 0'),
    "a canary on a GPU allows for no TF32": (CANARY, "if device == \"cpu\" else 1e-2", "if device else 1e-2"),
    "a canary on a GPU allows an old version": (CANARY, "else 1e-2", "else 1e-1"),
    "the rate is what it began with": (ENGINE, 'group["lr"] = lr', 'group["lr"] = group["lr"]'),
    "there is no warm-up": (UPDATE, "if step < learner.warmup_steps else", "if step < 0 else"),
    "a claim is tested the wrong way round": (CLAIMS, "better[s] - sum(", "-better[s] + sum("),
    "a verdict comes before the last run": (CLAIMS, "if not self.is_over:", "if False:"),
    "an uncorrected p decides": (CLAIMS, "self.p_holm <= 1 - LEVEL", "self.found.p <= 1 - LEVEL"),
    "a gain elsewhere is not taken off": (CLAIMS, "first[seed] - sum(one[seed] for one in others)", "first[seed]"),
    "growth is the last depth": (GROWTH, "weights = last - np.where(", "weights = last - 0 * np.where("),
    "the memory does not announce them either": (
        MEMORY,
        "version < run.state.published",
        "version <= run.state.published",
    ),
    "all depths have one list of draws": (SDGA, "order[members]", "order[: len(members)]"),
    "a turn has one version": (TURN, "completion.weight_versions or ()", "()"),
    "a version that is no number is the loaded one": (TURN, "else -1", "else 0"),
    "the adapter stays off": (LORA, "layer.enable_adapters(True)", "layer.enable_adapters(False)"),
    "the reference has the adapter": (LORA, "            layer.enable_adapters(False)\n", "            pass\n"),
    "an adapter is merged upside down": (
        LORA,
        'self.config["lora_alpha"] / self.config["r"]',
        'self.config["r"] / self.config["lora_alpha"]',
    ),
    "the gradient of several ranks is too small": (UPDATE, "else loss * ranks", "else loss"),
    "the mismatch is of the other direction": (
        ("metrics/update.py", "test_update.py"),
        "ratio - difference - 1",
        "1 / ratio + difference - 1",
    ),
    "sizes are kept for ever": (("training/selector.py", "test_loop.py"), ">= (step + 1) * count}", ">= 0}"),
    "no heartbeat while it ends": (THREAD, "await asyncio.to_thread(executor.shutdown)", "executor.shutdown()"),
    "an outage ends the heartbeat": (BEAT, 'log.debug("no heartbeat: %s", error)', "raise"),
    "a replaced learner keeps beating": (BEAT, "Fenced:\n                return", "Fenced:\n                pass"),
    "the learner does not leave": (BEAT, "await self._buffer.learner_leaves()", "pass"),
    "a broken heartbeat is not noticed": (LOOP, "publisher, saver, heartbeat", "publisher, saver"),
    "an unknown setting may change": (SCOPES, "next(given, Scope.MEANING)", "next(given, Scope.FREE)"),
    "a method's own setting may change": (SCOPES, "return Scope.SHARED", "return Scope.MEANING"),
    "a label is taken for a setting": (SCOPES, 'rest.partition(".")[2] if label else rest', "rest"),
    "quantisation may change": (("config/engines.py", "test_history.py"), "n: str | None", "n: Free[str | None]"),
    "a start's commit does not count": (STARTS, '"commit": start.commit or NOT_SET,\n', "\n"),
    "a start's packages do not count": (STARTS, '"package": start.versions, ', ""),
    "seeds are no part of a stream": (("streams.py", "test_streams.py"), "SeedSequence(seed,", "SeedSequence(0,"),
    "a step is saved twice": (("training/publisher.py", "test_saver.py"), "        self._saved = state.step\n", ""),
    "a version is damaged for ever": (LOADING, 'self._failed, self._idle_since = "", None', "self._idle_since = None"),
    "failures of another version count": (
        LOADING,
        "self._failures + 1 if name == self._failed else 1",
        "self._failures + 1",
    ),
    "a trajectory is as old as its newest token": (STEP, "t.oldest_version", "int(t.versions.max())"),
    "all have one reference": (UPDATE, "self._log_reference[micro]", "next(iter(self._log_reference.values()))"),
    "a filler has a gradient": (UPDATE, "0.0 * log_policy.sum() if micro.is_filler", "0.0 * log_policy.sum() if False"),
    "a reward may be NaN": (OWN, "if not math.isfinite(number):", "if False:"),
    "an index may come twice": (
        ("algorithm/methods/base.py", "test_loop.py"),
        "falls = np.flatnonzero(indices[1:] <= indices[:-1])",
        "falls = np.flatnonzero(indices[1:] < indices[:-1])",
    ),
    "an empty pool is trained on": (LOOP, "if not pool.trajectories:", "if False:"),
    "a run without an advantage succeeds": (LOOP, "and not has_learned:", "and False:"),
    "another corpus is searched": (SERVED, "if serves is not None and serves != self.serves:", "if False:"),
    "another Redis has the folder": (OWNER, "if here != last.buffer and not self._accepts_changes:", "if False:"),
    "a hung worker asks": (("rollout/loop.py", "rollout/test_loop.py"), " or self._status().hangs(", " or 0 * ("),
    "random tokens are the first": (
        CONTROLS,
        "order = rng.permutation(in_buckets(pool, self.settings))",
        "order = in_buckets(pool, self.settings)",
    ),
    "strata of neighbours are one": (STRATIFIED, "(pool.s_max + 1) + pool", "pool.s_max + pool"),
    "AR3PO's largest group is G": (AR3PO, "return 2 * rollouts", "return rollouts"),
    "what is alone is usable": (USABLE, "1 - steps[\"groups/singleton_share\"].to_numpy(float) - ", "1 - "),
    "a run is compared where it has ended": (USABLE, "count = min(", "count = max("),
    "what was trained on later counts earlier": (USABLE, 'side="right")) - 1', 'side="right"))'),
    "a push down is a negative weight": (STEP, "np.abs(advantages.values) *", "advantages.values *"),
    "a singleton has no tokens": (STEP, "[t.sampled_tokens for t in selected]", "[1 for t in selected]"),
    "those of the pool are no singletons": (STEP, "members[t.ticket] == 1", "members[t.ticket] >= 1"),
    "flat groups are usable": (ADVANTAGES, "len(self.values) - self.alone - self.flat", "len(self.values)"),
    "who sleeps keeps the GPUs": (GPU_SHARE, "                lock.release()\n", ""),
} | SCRIPTS | TRAVELLING | AGENTS  # fmt: skip


def files_of(folder: Path, tests: str) -> list[Path]:
    """The file of that name, and those whose names begin with its name."""
    return sorted((folder / "tests").rglob(tests.replace(".py", "*.py")))


def run_tests(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    files = map(str, files_of(folder, tests))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300 * SLOW, check=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of library and tests that may be spoiled."""
    folder = tmp_path_factory.mktemp("mutants")
    for name in ("cusearch_async", "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(checkout: Path, name: str):
    (module, tests), right, wrong = MUTANTS[name]
    path = checkout / "cusearch_async" / module
    source = path.read_text(encoding="utf-8")
    assert source.count(right) == 1, "the mutant no longer fits the code"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    try:
        outcome = run_tests(checkout, tests)
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path)
    assert outcome.returncode == 1, outcome.stdout[-2000:]
    assert "FAILED tests" in outcome.stdout


def test_without_a_planted_bug_the_copy_passes(checkout: Path):
    outcome = run_tests(checkout, SDGA[1])
    assert outcome.returncode == 0, outcome.stdout[-2000:]
