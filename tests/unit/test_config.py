"""The configuration: bounds, precedence, origins, errors; hosts; several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.machines import pretend_cores
from tests.unit.configs import config_of
from vsched.config import (
    ArenaConfig,
    Config,
    GenerateConfig,
    ModelConfig,
    keys_table,
    load_config,
    plain_config,
    to_toml,
)
from vsched.config.devices import assumed
from vsched.engine import Engine
from vsched.errors import ConfigError

ROOT = Path(__file__).parents[2]
IMAGE_HOSTS = ("images.example.com", "B.example.com:8443", "[::1]", "[::1]:8080", "127.0.0.1:65535")
HOSTS = 'cluster.hosts={far = "tcp://10.0.0.2:7700"}'
KEY = "cluster.key_file=hosts.key"
THERE = 'cluster.generate=["far", "local"]'
FAR = [HOSTS, KEY, THERE]
RAY = "cluster.ray=auto"


def write(folder: Path, text: str) -> Path:
    path = folder / "vsched.toml"
    path.write_text(text)
    return path


def refusal(
    sets: Sequence[str] = (), *, path: Path | None = None, environ: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets=sets, environ=environ or {})
    return str(caught.value)


def test_config_built_in_python_has_values_of_the_declared_types() -> None:
    """A record has it, and is read back as these types."""
    odd = Config(
        model=ModelConfig(path=Path("some/where")),  # type: ignore[arg-type]
        generate=GenerateConfig(
            slots=np.int64(3),  # type: ignore[arg-type]
            step_target_ms=np.float32(20),  # type: ignore[arg-type]
            admission={"use": "token-budget", "max_items": np.int64(4)},
        ),
    )
    plain = plain_config(odd)
    assert msgspec.convert(msgspec.to_builtins(plain), Config) == plain
    assert (plain.model.path, plain.generate.slots) == ("some/where", 3)
    small = Config(arena=ArenaConfig(embedding_bytes=1024))
    assert plain_config(small) == small, "a simulation has less than a file may require"
    assert Engine(odd).config == assumed(plain)


def test_config_built_in_python_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^generate.slots is not valid: value 'many', limit"):
        plain_config(Config(generate=GenerateConfig(slots="many")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^config is not valid: value LoadedConfig\("):
        plain_config(load_config(None, environ={}))  # type: ignore[arg-type]


def test_config_precedence_is_command_line_environment_file_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[generate]\nslots = 1\nblock_size = 8\nmax_waiting = 5\n")
    environ = {"VSCHED__GENERATE__SLOTS": "2", "VSCHED__GENERATE__BLOCK_SIZE": "32", "PATH": "/bin"}
    loaded = load_config(path, sets=["generate.slots=3"], environ=environ)
    generate = loaded.config.generate
    assert (generate.slots, generate.block_size, generate.max_waiting) == (3, 32, 5)
    assert loaded.origins["generate.slots"] == "command line"
    assert loaded.origins["generate.block_size"] == "environment VSCHED__GENERATE__BLOCK_SIZE"
    assert loaded.origins["generate.max_waiting"] == f"file {path}"
    assert loaded.origins["generate.chunk_tokens"] == "default"


@pytest.mark.parametrize(
    ("assignment", "section", "key", "value"),
    [
        ("model.name=7", "model", "name", "7"),
        ('model.name="7"', "model", "name", "7"),
        ("model.path=a b/c=d", "model", "path", "a b/c=d"),
        ("generate.prefix_cache=false", "generate", "prefix_cache", False),
        ("generate.slots = 1_0", "generate", "slots", 10),
        ("deadlines.step_s=3", "deadlines", "step_s", 3.0),
        (f"media.hosts={msgspec.json.encode(IMAGE_HOSTS).decode()}", "media", "hosts", IMAGE_HOSTS),
    ],
)
def test_config_set_parses_by_type(assignment: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(config_of(assignment), section), key) == value


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ("generate.slots=1.5", "generate.slots (from command line) is not valid: value 1.5,"),
        ("server.host=", "server.host (from command line) is not valid: value '', limit an address, or 0.0"),
        ("generate.slots=true", "generate.slots (from command line) is not valid: value True,"),
        (
            "encode.weights_group=17",
            "encode.weights_group (from command line) is not valid: value 17, limit int, 0 to 128, a mult",
        ),
        ("deadlines.step_s=nan", "deadlines.step_s (from command line) is not valid: value nan,"),
        # ZeroMQ counts milliseconds in 32 bits, and the record nanoseconds in 64.
        ("deadlines.rank_timeout_s=1e7", "deadlines.rank_timeout_s (from command line) is not valid:"),
        ("deadlines.waiting_s=1e12", "deadlines.waiting_s (from command line) is not valid: value 1000"),
        ("placement=apart", "placement (from command line) is not valid: value 'apart', limit"),
        ("server.body_bytes_max=9223372036854775808", "server.body_bytes_max (from command line) is not"),
        ('record.path="a\\u0000b"', "record.path (from command line) is not valid: value 'a\\x00b', limit"),
        ("placment=together", "placment (from command line): unknown key. Did you mean placement?"),
        ("zzz=1", "zzz (from command line): unknown key. Keys here: placement, model, server,"),
        ("routing=round-robin", "routing (from command line): not a table; write routing = {use ="),
        ("routing.use=1", "routing.use: no policy is named."),
        ('media.hosts=["https://a.com"]', "media.hosts (from command line) is not valid: value ["),
        ('media.private_hosts=["a.com:65536"]', "media.private_hosts (from command line) is not"),
        (
            "generate.chunk_tokens=4096",
            "generate.chunk_tokens: a chunk cannot be longer than a step (generate.max_batch_tokens):",
        ),
        ("deadlines.heartbeat_s=10", "deadlines.heartbeat_s: a rank must not time out over one"),
        ('generate.memory={use="pinned", tokens=1, bytes=1}',
         "generate.memory: the size of the KV cache must be given once: value both of tokens"),
        (
            "generate.memory.mem_fraction=1.01",
            "generate.memory.mem_fraction is not valid: value 1.01, limit number, above 0, at most 1. Remedy: set",
        ),
        ('cluster.hosts={far="10.0.0.2"}',
         "cluster.hosts (from command line) is not valid: value {"),
        ('cluster.hosts={local = "tcp://h:1"}', "cluster.hosts: 'local' is this host"),
        ([KEY, THERE], "cluster.generate: there is no host 'far'. Remedy: name one of local"),
        ([HOSTS, THERE], "cluster.key_file: not set"),
        ([HOSTS, KEY, 'cluster.encode=["far"]', "placement=together"],
         "cluster.encode: with placement = together"),
        ([*FAR, "adapters.count_max=2"], "adapters.count_max: ranks on other hosts"),
        ([RAY, "adapters.count_max=2"], "adapters.count_max: ranks on other hosts"),
        ('cluster.hosts={ray = "tcp://h:1"}', "cluster.hosts: 'ray' is Ray's"),
        ('cluster.encode=["ray"]', "cluster.encode: there is no host 'ray'"),
        ("cluster.ray=ray://head:1", "cluster.ray (from command line) is not valid: value 'ray:"),
        ([RAY, 'cluster.encode=["ray", "local"]'], "cluster.encode: ray, local: Ray"),
        ([RAY, "cluster.encode_resources={CPU=0}"],
         "cluster.encode_resources.CPU: no amount of a resource: value 0"),
        ([RAY, HOSTS, 'cluster.encode=["far"]'], "cluster.key_file: not set"),
        ("encode.reserved=auto", "encode.reserved (from command line) is not valid: value 'auto'"),
        *(
            (f'encode.memory_limit="{size}"', "encode.memory_limit (from command line) is not")
            for size in ("4GB", "-1", "", "GiB", "1e3", "4 G iB", "nan")
        ),
    ],
)  # fmt: skip
def test_config_refusal_has_the_key_and_the_limit(sets: str | list[str], expected: str) -> None:
    assert refusal([sets] if isinstance(sets, str) else sets).startswith(expected)


def test_config_reports_all_typos_at_once(tmp_path: Path) -> None:
    """Of the file, the environment and the command line; keys, types, bounds, names, fields and sizes."""
    path = write(
        tmp_path,
        'modle = 1\n[generate]\nslotz = 1\nthreads = "two"\n[encode]\nplugin = "transformer"\n'
        '[routing]\nuse = "round-robbin"\n[encode.admission]\nmax_token = 3\nmax_items = 0\n',
    )
    environ = {"VSCHED__SERVER__PORT": "70000", "VSCHED__GENERATE_SLOTS": "3"}
    sets = ["encode.memory_limit=4GB", "generate.device=cuda:x", "port=1", "slots", "arena=2"]
    reported = refusal(sets, path=path, environ=environ).splitlines()
    file = f"(from file {path})"
    expected = [
        f"modle {file}: unknown key. Did you mean model?",
        f"generate.slotz {file}: unknown key. Did you mean generate.slots?",
        "generate_slots (from environment VSCHED__GENERATE_SLOTS): unknown key. Did you mean generate.slots?",
        "slots: not an assignment",
        "port (from command line): unknown key. Did you mean server.port?",
        "arena (from command line): a table of keys, not a value",
        "server.port (from environment VSCHED__SERVER__PORT) is not valid: value 70000, limit int, 0 to 65535",
        f"generate.threads {file} is not valid: value 'two', limit int, 1 to 512",
        "encode.admission.max_token: unknown field of 'token-budget'. ",
        "encode.admission.max_items is not valid: value 0, limit int, 1 or more",
        "routing.use: 'round-robbin' is unknown. ",
        "encode.plugin: 'transformer' is unknown. ",
        "encode.memory_limit (from command line) is not valid: value '4GB', limit int, 0 or more; auto, a number",
        "generate.device (from command line) is not valid: value 'cuda:x', limit auto, cpu, cuda, or cuda:N with",
    ]
    assert [start for start in expected if not any(one.startswith(start) for one in reported)] == []
    assert len(reported) == len(expected)
    for idea in ("max_tokens", "round-robin", "transformers"):
        assert sum(one.endswith(f" Did you mean {idea}?") for one in reported) == 1, idea


def test_config_conflicts_are_reported_together_once_each_value_is_legal() -> None:
    sets = ["generate.chunk_tokens=4096", "generate.slots=2048"]
    lines = refusal(sets).splitlines()
    assert [one.partition(":")[0] for one in lines] == ["generate.chunk_tokens", "generate.slots"]
    reported = refusal([*sets, "generate.max_batch_token=8192"]).splitlines()
    assert [one.partition(" ")[0] for one in reported] == ["generate.max_batch_token"]


def test_config_value_in_place_of_a_table_is_reported_next_to_a_key_of_the_table() -> None:
    environ = {"VSCHED__GENERATE": "3", "VSCHED__GENERATE__SLOTS": "4"}
    place = "generate (from environment VSCHED__GENERATE)"
    assert refusal(environ=environ).startswith(f"{place}: a table of keys, not a value")
    said = refusal(["arena=3", "arena.pixel_bytes=1GiB"])
    assert said.startswith("arena (from command line): a table of keys, not a value")


def test_config_refusals_of_files_name_the_file(tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    remedy = "Remedy: check the path of --config"
    assert refusal(path=gone) == f"{gone}: cannot be read: No such file or directory. {remedy}"
    assert refusal(path=tmp_path) == f"{tmp_path}: cannot be read: Is a directory. {remedy}"
    path = write(tmp_path, "[generate\n")
    assert refusal(path=path).startswith(f"{path}: not valid TOML: ")
    assert refusal(path=path).endswith("written in TOML, as [generate] and slots = 8")
    path = write(tmp_path, f"a = {'[' * 3000}{']' * 3000}")
    assert refusal(path=path).startswith(f"{path}: not valid TOML: maximum recursion depth")
    path = write(tmp_path, "[generate]\nslot = 1\n")
    assert refusal(path=path).startswith(f"generate.slot (from file {path}): unknown key.")


def test_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = write(tmp_path, "\ufeff[generate]\nslots = 3\n")
    assert load_config(path, environ={}).config.generate.slots == 3


def test_config_text_cannot_smuggle_further_keys() -> None:
    config = config_of('model.name="a"\n[generate]\nslots = 1')
    assert config.generate.slots == 64
    assert "slots = 1" in config.model.name


@pytest.mark.parametrize(
    ("environ", "sets", "expected"),
    [
        ({}, ["max_items=2"], {"use": "token-budget", "max_tokens": 9, "max_items": 2}),
        ({}, ["use=fifo"], {"use": "fifo"}),
        # The order of a name and its fields does not matter.
        ({}, ["max_items=3", "use=token-budget"], {"use": "token-budget", "max_items": 3}),
        ({"USE": "token-budget", "MAX_ITEMS": "3"}, [], {"use": "token-budget", "max_items": 3}),
    ],
)
def test_config_layer_that_names_a_policy_replaces_the_table(
    tmp_path: Path, environ: dict[str, str], sets: list[str], expected: dict[str, object]
) -> None:
    path = write(tmp_path, '[encode.admission]\nuse="token-budget"\nmax_tokens=9\nmax_items=3\n')
    loaded = load_config(
        path,
        sets=[f"encode.admission.{one}" for one in sets],
        environ={f"VSCHED__ENCODE__ADMISSION__{key}": value for key, value in environ.items()},
    )
    assert loaded.config.encode.admission == expected


def test_config_memory_size_in_bytes_replaces_the_one_in_tokens() -> None:
    environ = {"VSCHED__GENERATE__MEMORY": '{use="pinned", tokens=64}'}
    config = load_config(None, sets=["generate.memory.bytes=1000"], environ=environ).config
    assert config.generate.memory == {"use": "pinned", "bytes": 1000}
    changed = config_of("generate.memory.mem_fraction=0.5").generate.memory
    assert changed == {"use": "auto-profile", "mem_fraction": 0.5}


@pytest.mark.parametrize(
    ("sets", "tokens", "items"),
    [
        ([], 2048, 1),
        (["generate.max_batch_tokens=1024"], 1024, 1),
        (["encode.admission.max_tokens=300"], 300, 1),
        (["encode.admission.max_tokens=0"], None, 1),
        (["encode.device=cuda:0"], 2048, 8),
        (["encode.admission.max_items=3"], 2048, 3),
        (["encode.admission.use=fifo"], None, 1),
        (["encode.admission.use=fifo", "encode.device=cuda:0"], None, 8),
        (["encode.admission.max_items=8", "encode.replicas=2"], 2048, 4),
        (["encode.admission.max_items=1", "encode.replicas=2"], 2048, 1),
    ],
)
def test_config_encode_budget_limits_items_and_their_tokens(
    sets: list[str], tokens: int | None, items: int
) -> None:
    """The default of its tokens derives from the batch budget; 0 means no limit; replicas share the items."""
    policies = load_config(None, sets=sets, environ={}).policies
    assert (policies.item_tokens_max, policies.encode_items_max) == (tokens, items)


def test_config_shown_as_toml_loads_to_the_same(tmp_path: Path) -> None:
    sets = [
        'model.name=a "quoted" \\ name',
        "encode.threads=3",
        "encode.admission.max_tokens=77",
        'media.hosts=["a.org"]',
        'adapters.load={"of 3.1" = "/adapters/one", two = "/adapters/two"}',
        "adapters.count_max=2",
    ]
    first = load_config(None, sets=sets, environ={})
    again = load_config(write(tmp_path, to_toml(first, origin=True)), environ={})
    assert to_toml(again) == to_toml(first)
    assert again.policies == first.policies
    assert again.config.model == first.config.model
    assert again.config.adapters == first.config.adapters
    assert "max_tokens = 77  # command line" in to_toml(first, origin=True).splitlines()


def test_config_documentation_is_current() -> None:
    text = (ROOT / "docs/config.md").read_text()
    assert keys_table() in text, "run `vsched config keys` and put its table into docs/config.md"


def test_cluster_of_hosts_is_read() -> None:
    cluster = config_of(*FAR).cluster
    assert cluster.hosts == {"far": "tcp://10.0.0.2:7700"}
    assert cluster.generate == ["far", "local"]
    assert cluster.elsewhere


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[fd00::1]:6379"])
def test_cluster_on_ray_needs_no_key(address: str) -> None:
    """A stage whose list is empty starts there."""
    cluster = config_of(f'cluster.ray="{address}"', 'cluster.encode=["local"]').cluster
    assert cluster.elsewhere
    assert (cluster.hosts_of("encode"), cluster.hosts_of("generate")) == (["local"], ["ray"])


@pytest.mark.parametrize(
    ("sets", "cores", "processes", "threads"),
    [
        ([], 16, (2, 0), (8, 8)),
        (["generate.replicas=2", "generate.tensor_parallel=3"], 16, (7, 0), (2, 2)),
        (["generate.threads=5"], 16, (2, 0), (8, 5)),
        (["encode.replicas=2", "generate.replicas=2"], 2, (4, 0), (1, 1)),
        (["placement=together"], 2, (1, 0), (2, 2)),
        # A rank on another host takes none of the cores of this one.
        ([HOSTS, KEY, 'cluster.encode=["far"]'], 12, (1, 1), (12, 12)),
        ([*FAR, "generate.replicas=3", "generate.tensor_parallel=2"], 12, (3, 4), (4, 4)),
        ([*FAR, "placement=together"], 12, (0, 1), (12, 12)),
    ],
)
def test_config_threads_default_to_the_share_of_a_rank(
    sets: list[str],
    cores: int,
    processes: tuple[int, int],
    threads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that start in parallel, here and on the other host, do not take each other's cores."""
    pretend_cores(monkeypatch, cores)
    config = config_of(*sets)
    assert (config.processes_on("local"), config.processes_on("far")) == processes
    assert (config.threads("encode"), config.threads("generate")) == threads


@pytest.mark.parametrize(
    ("sets", "encode", "generate"),
    [
        (["placement=separate"], "", ""),
        (["placement=separate", "generate.threads=2"], "", "generate.threads"),
        # One process has the threads of both stages.
        (["placement=together"], "", ""),
        (["placement=together", "encode.threads=1"], "encode.threads", "encode.threads"),
        (["placement=together", "encode.replicas=0", "encode.threads=1"], "encode.threads", ""),
        (["generate.tensor_parallel=2"], "", "generate.tensor_parallel"),
        (["generate.tensor_parallel=2", "generate.threads=1"], "", "generate.threads"),
        (["encode.device=cuda", "encode.threads=1"], "encode.device", ""),
    ],
)
def test_config_names_what_fixes_threads(sets: list[str], encode: str, generate: str) -> None:
    config = config_of(*sets)
    found = (config.threads_fixed_by("encode"), config.threads_fixed_by("generate"))
    assert found == (encode, generate)


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (["generate.replicas=2"], "replicas", ": value 1, limit {}, which is 2"),
        (["encode.tensor_parallel=4", "generate.tensor_parallel=2"], "tensor_parallel",
         ": value 4, limit {}, which is 2"),
        # A process has one current CUDA device, on which Triton starts kernels.
        (["encode.device=cuda:1", "generate.device=cuda"], "device",
         ", each with one device: value cuda:1, limit {}, which is cuda"),
    ],
)  # fmt: skip
def test_config_stages_together_are_equally_placed(sets: list[str], key: str, said: str) -> None:
    """Worker group i serves encode-i and generate-i, so there are as many of both; apart they may differ."""
    together = "with placement = together both stages run in the same processes"
    assert refusal([*sets, "placement=together"]).startswith(
        f"encode.{key}: {together}{said.format(f'generate.{key}')}. Remedy:"
    )
    config_of(*sets)
    assert config_of("encode.replicas=2", "generate.replicas=2", "placement=together").ranks == 4
    config_of("encode.device=cuda:0", "generate.device=cuda", "placement=together")
