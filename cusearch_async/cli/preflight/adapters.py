"""What an adapter (learner.lora) takes: parameters, bytes of a published version, memory of a learner rank."""

from __future__ import annotations

from dataclasses import replace

from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.cli.preflight.sizing import BUCKET_ELEMENTS, DTYPE_BYTES, FLOAT32, LearnerMemory


def linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The linear layers of one block of the model: name -> (inputs, outputs)."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    intermediate = shape.config.intermediate_size
    return {
        "q_proj": (shape.hidden, query),
        "k_proj": (shape.hidden, key),
        "v_proj": (shape.hidden, key),
        "o_proj": (query, shape.hidden),
        "gate_proj": (shape.hidden, intermediate),
        "up_proj": (shape.hidden, intermediate),
        "down_proj": (intermediate, shape.hidden),
    }


def adapter_parameters(shape: ModelShape, rank: int, names: tuple[str, ...] = ()) -> int:
    """Elements of A [rank, inputs] and B [outputs, rank] of the layers `names`, or of all linear layers."""
    layers = linear_layers(shape)
    return shape.layers * rank * sum(sum(layers[name]) for name in names or layers if name in layers)


def version_share(shape: ModelShape, trained: int) -> float:
    """Bytes of a published adapter of `trained` parameters, as a share of those of the whole model."""
    return trained / shape.parameters


def with_adapter(memory: LearnerMemory, dtype: str, stage: int, ranks: int, trained: int) -> LearnerMemory:
    """The memory of a rank that trains the whole model, changed to that of one that trains an adapter of `trained`
    parameters.

    The model's weights stay, and are divided only at stage 3. There is no second model for the reference. Masters,
    moments, gradients and the buckets they are summed in are the adapter's. Activations stay: the adapter's A needs the
    input of each layer for its gradient."""
    size, share = DTYPE_BYTES[dtype], -(-trained // ranks)
    stepped = share if stage else trained
    is_plain = stage == 0 and dtype == "float32"
    own_buckets = size * min(trained, BUCKET_ELEMENTS) if stage or ranks > 1 else 0
    return replace(
        memory,
        weights=memory.weights + size * (share if stage == 3 else trained),
        reference=0,
        optimizer=FLOAT32 * stepped * (2 if is_plain else 3) if memory.optimizer else 0,
        gradients=size * (share if stage >= 2 else trained),
        buffers=memory.buffers if stage == 3 else own_buckets,  # ZeRO-3 gathers the model's weights all the same
        step=FLOAT32 * stepped * (1 if is_plain else 2) if memory.step else 0,
    )
