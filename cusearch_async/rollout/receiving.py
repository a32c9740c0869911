"""New weights from the learner itself, through vLLM's weight transfer: over NCCL, on a CPU over gloo."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cusearch_async.errors import WeightsMismatch, WeightsUnavailable, first_line
from cusearch_async.lifecycle.signals import end_tasks
from cusearch_async.transport.gloo import TIMEOUT_S
from cusearch_async.transport.tensor_file import dtype_of
from cusearch_async.transport.weight_link import Backend, SentVersion, WeightLink
from cusearch_async.transport.weights import Manifest

RESTART = "the engine cannot be used any more: restart the worker"


def backend() -> Backend:
    return "gloo" if current_platform.is_cpu() else "nccl"


async def join(llm: AsyncLLM, link: WeightLink) -> None:
    """The engine's ranks and the learner have a process group, a new one if the connection is new.

    Raises: WeightsUnavailable; WeightsMismatch when the engine has several ranks: vLLM does not wait for the others
    when one fails, and would take their answers for those of the next call; EngineDeadError."""
    if link.is_joined:
        return
    ranks = llm.vllm_config.parallel_config.world_size
    await llm.shutdown_weight_transfer_engine()  # the group with a learner before
    port = await link.join(backend(), ranks)
    group: dict[str, Any] = {
        "master_address": link.host,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
    }
    if backend() == "nccl":
        group["packed"] = False  # the learner sends one tensor after the other
    try:
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(group))
    except EngineDeadError:
        raise
    except Exception as error:
        await link.close()
        said = f"the engine and the learner at {link.url} cannot make a process group: {first_line(error)}"
        raise (WeightsUnavailable(said) if ranks == 1 else WeightsMismatch(f"{said}; {RESTART}")) from error
    link.is_joined = True


async def receive(llm: AsyncLLM, version: SentVersion) -> str | None:
    """The model of a paused engine has the version; else why not, and it has what it had.

    Raises: WeightsMismatch when it has neither; EngineDeadError."""
    link = version.link
    await llm.start_weight_update()
    sending = asyncio.ensure_future(link.send())
    receiving = asyncio.ensure_future(llm.update_weights(WeightTransferUpdateRequest(described(version.manifest))))
    try:
        done, _ = await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_EXCEPTION)
        problem = next((error for future in done if (error := future.exception())), None)
        if problem is not None:
            await link.close()  # that ends the other side too
            await asyncio.wait([sending, receiving], timeout=TIMEOUT_S)
    finally:
        await end_tasks([sending, receiving])
    if isinstance(problem, EngineDeadError):
        raise problem
    if problem is not None:
        said = f"{version.name} was not received from {link.url}: {first_line(problem)}"
        if backend() == "nccl" or llm.vllm_config.parallel_config.world_size > 1:  # vLLM has begun to load; see `join`
            raise WeightsMismatch(f"{said}; {RESTART}") from problem
        return said
    try:
        await llm.finish_weight_update(str(version.manifest.version))
    except EngineDeadError:
        raise
    except Exception as error:
        raise WeightsMismatch(
            f"loading {version.name} failed halfway; the engine cannot be used any more: {first_line(error)}; are "
            "these the weights of this model?"
        ) from error
    return None


def described(manifest: Manifest) -> dict[str, Any]:
    """What vLLM has to know of tensors that it receives."""
    records = manifest.tensors.values()
    return {
        "names": list(manifest.tensors),
        "dtype_names": [str(dtype_of(record)).removeprefix("torch.") for record in records],
        "shapes": [record.shape for record in records],
    }
