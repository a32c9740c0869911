"""The settings of a run: TOML files, then command-line overrides, checked before anything starts.

A file states only what differs from the defaults. Unknown keys, impossible combinations and lengths that do
not fit are errors that name the key, the value and the fix. Secrets are not settings (see `secrets`).
"""

from cusearch_async.config.engines import DeepSpeedConfig, RolloutConfig, VllmConfig, refuse_unknown
from cusearch_async.config.episode import EnvironmentConfig, EpisodeConfig
from cusearch_async.config.keys import flat, known_keys, scope_in, scope_of, section_of
from cusearch_async.config.messages import explain_unknown
from cusearch_async.config.method import MethodConfig, PoolConfig
from cusearch_async.config.reading import (
    CONFIG_HELP,
    as_toml,
    load_config,
    of_toml,
    overrides_of,
    save_config,
    saved_in,
    shipped_configs,
    with_overrides,
)
from cusearch_async.config.redis import RedisConfig
from cusearch_async.config.retriever import (
    BACKENDS,
    E5,
    EMBEDDED,
    MAX_TOPK,
    Bm25Config,
    DenseConfig,
    RerankConfig,
    RetrieverConfig,
    WebConfig,
    ZeroSearchConfig,
)
from cusearch_async.config.run import (
    STARTER,
    STARTERS,
    DataConfig,
    EvalConfig,
    JudgeConfig,
    ModelConfig,
    RunConfig,
    WeightsConfig,
)
from cusearch_async.config.secrets import (
    LOOPBACK,
    agents_token,
    given_page_token,
    is_loopback,
    make_page_token,
    make_weights_token,
    redis_password,
    redis_password_file,
    secret,
    weights_token,
)
from cusearch_async.config.section import Extensible, Scope
from cusearch_async.config.training import LearnerConfig, LoraConfig, LossConfig
from cusearch_async.config.whole import Config
