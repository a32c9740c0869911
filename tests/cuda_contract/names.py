"""What our code expects of vLLM, by name, and what a folder of vLLM's Python sources has of it. Nothing is imported."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROLLOUT = Path(__file__).parents[2] / "cusearch_async" / "rollout"
MODULES = [ROLLOUT / name for name in ("engine.py", "staging.py", "turn_scheduler.py")]
"""Those that import vLLM: in a worker, and in its engine's process."""

CONTRACT: dict[str, set[str]] = {
    # what engine.py imports and calls
    "__init__.py:MODULE_ATTRS": {"AsyncEngineArgs", "SamplingParams"},
    "platforms/__init__.py:__getattr__": {"current_platform"},
    "platforms/interface.py:Platform": {"is_cpu"},
    "engine/arg_utils.py:AsyncEngineArgs": {
        *("model", "dtype", "max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching", "logprobs_mode"),
        *("generation_config", "disable_log_stats", "use_tqdm_on_load", "block_size", "enable_chunked_prefill"),
        *(
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "enable_lora",
            "lora_target_modules",
            "max_loras",
            "max_lora_rank",
            "enable_sleep_mode",
            "worker_extension_cls",
            "scheduler_cls",
            "tokenizer_mode",
        ),
    },
    "config/model.py:LogprobsMode": {"processed_logprobs"},
    "config/model.py:TokenizerMode": {"hf"},
    "sampling_params.py:SamplingParams": {
        *("max_tokens", "temperature", "seed", "logprobs", "flat_logprobs", "output_kind", "stop_token_ids", "stop"),
        *("detokenize", "include_stop_str_in_output", "prompt_logprobs", "skip_clone"),
    },
    "inputs/engine.py:tokens_input": {"prompt_token_ids", "cache_salt"},
    "sampling_params.py:RequestOutputKind": {"FINAL_ONLY"},
    "v1/engine/exceptions.py:EngineDeadError": set(),
    "v1/engine/exceptions.py:EngineGenerateError": set(),
    "v1/engine/async_llm.py:AsyncLLM": {
        *("from_engine_args", "generate", "pause_generation", "resume_generation", "collective_rpc"),
        *("update_weight_version", "compute_weight_checksums", "shutdown", "output_processor", "add_lora"),
        *("sleep", "wake_up"),
    },
    "v1/engine/async_llm.py:AsyncLLM.from_engine_args": {"engine_args"},
    "v1/engine/async_llm.py:AsyncLLM.generate": {"prompt", "sampling_params", "request_id", "lora_request"},
    "v1/engine/async_llm.py:AsyncLLM.add_lora": {"lora_request"},
    "lora/request.py:LoRARequest": {"lora_name", "lora_int_id", "lora_path", "load_inplace"},
    "config/lora.py:MaxLoRARanks": set(),
    "v1/engine/async_llm.py:AsyncLLM.sleep": {"level"},
    "v1/engine/async_llm.py:AsyncLLM.pause_generation": {"mode", "clear_cache"},
    "v1/engine/async_llm.py:AsyncLLM.collective_rpc": {"method", "kwargs"},
    # what turn_scheduler.py changes
    "v1/core/sched/scheduler.py:Scheduler": {"update_from_output", "has_requests", "pause_state", "requests"},
    "v1/core/sched/interface.py:PauseState": {"UNPAUSED"},
    "v1/core/sched/output.py:SchedulerOutput": set(),
    "v1/engine/__init__.py:EngineCoreOutput": {
        *("request_id", "new_token_ids", "new_logprobs", "prefill_stats", "events", "finished")
    },
    "v1/engine/__init__.py:EngineCoreOutputs": {"outputs", "scheduler_stats", "finished_requests"},
    "v1/outputs.py:LogprobsLists": {"logprob_token_ids", "logprobs", "sampled_token_ranks"},
    "v1/outputs.py:ModelRunnerOutput": set(),
    # what staging.py has vLLM's loader do
    "model_executor/layers/linear.py:UnquantizedLinearMethod": set(),
    "model_executor/layers/vocab_parallel_embedding.py:UnquantizedEmbeddingMethod": set(),
    "model_executor/model_loader/reload/layerwise.py:get_layerwise_info": {"layer"},
    "model_executor/model_loader/reload/layerwise.py:initialize_layerwise_reload": {"model"},
    "model_executor/model_loader/reload/layerwise.py:finalize_layerwise_reload": set(),
    "model_executor/model_loader/reload/types.py:LayerReloadingInfo": {"restore_metadata", "restore_device"},
    "v1/engine/async_llm.py:AsyncLLM.update_weight_version": {"new_version"},
    "v1/engine/__init__.py:PauseMode": {"keep"},
    "v1/engine/output_processor.py:OutputProcessor": {"process_outputs"},
    # what comes back
    "outputs.py:RequestOutput": {"outputs", "prompt_logprobs"},
    "outputs.py:CompletionOutput": {"token_ids", "logprobs", "weight_versions"},
    "outputs.py:WeightVersionSpan": {"start", "end", "version"},
    "logprobs.py:FlatLogprobs": {"logprobs"},
    "logprobs.py:Logprob": {"logprob"},
    # what the engine's process is asked to do, on a GPU
    "v1/worker/gpu_worker.py:Worker": {"reload_weights", "sleep", "wake_up"},
    "v1/worker/gpu/model_runner.py:GPUModelRunner.reload_weights": {"weights_iterator"},
    "v1/worker/gpu_model_runner.py:GPUModelRunner.reload_weights": {"weights_iterator"},
    # what configure_process sets
    "envs.py:environment_variables": {
        *("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"),
        "VLLM_LOGGING_LEVEL",
    },
}
"""File:name, or file:name.method -> what that must have: attributes of a class, parameters of a function, texts of a
constant."""

OPTIONS: dict[str, set[str]] = {
    "engine/arg_utils.py:AsyncEngineArgs": {
        *("gpu_memory_utilization", "tensor_parallel_size", "quantization", "kv_cache_dtype", "async_scheduling"),
        *("compilation_config", "enable_sleep_mode", "worker_extension_cls"),
    },
    "v1/engine/async_llm.py:AsyncLLM": {"is_sleeping"},
    "v1/engine/async_llm.py:AsyncLLM.sleep": {"level", "mode"},
    "v1/engine/async_llm.py:AsyncLLM.wake_up": {"tags"},
}
"""As CONTRACT, of what a setting may ask for: taking turns on a GPU, adapters, checksums."""


def missing(vllm: Path, contract: dict[str, set[str]]) -> list[str]:
    """What the sources in the folder `vllm` lack of the contract, in words."""
    found = []
    for place, names in contract.items():
        offered = offers(vllm, place)
        if offered is None:
            found.append(f"{place} is not there")
        elif lacking := sorted(names - offered):
            found.append(f"{place} has no {', '.join(lacking)}")
    return found


def offers(vllm: Path, place: str) -> set[str] | None:
    """The names that a place of the contract has, those of a class's bases in the same file included; None if the place
    does not exist."""
    file, _, path = place.partition(":")
    if not (vllm / file).exists():
        return None
    tree = _parse(vllm / file)
    node: ast.AST | None = tree
    for name in path.split("."):
        node = next((child for child in ast.iter_child_nodes(node) if name in _defined(child)), None)
        if node is None:
            return None
    if isinstance(node, ast.ClassDef):
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        inherited = [offers(vllm, f"{file}:{base}") or set() for base in bases if base != node.name]
        return _attributes(node).union(*inherited)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _parameters(node) | _texts(node)
    return _texts(node)


def called() -> set[str]:
    """Every name that our modules import from vLLM, give to it as an argument, or ask of its engine."""
    nodes = [node for module in MODULES for node in ast.walk(_parse(module))]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and str(n.module).split(".")[0] == "vllm"]
    imported = {alias.name for node in imports for alias in node.names}
    found = set(imported)
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in imported:
            found |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._llm", "llm", *imported):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("_arguments"):
            keys = [key for inner in ast.walk(node) if isinstance(inner, ast.Dict) for key in inner.keys]
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return found


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Of the class itself, and what its methods set on `self`."""
    own = {name for child in node.body for name in _defined(child)}
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return own | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
