"""Configuration that cannot be: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from gateway.config import checks
from gateway.config.checks import RESERVED_CALLERS
from gateway.config.problems import SettingsError
from gateway.config.settings import public_settings
from gateway.metadata.snapshots.store import valid_name
from tests.support.gateway_process import to_toml
from tests.support.settings import load, problems

SLOT = '[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
ROLE = '[[origin_credentials]]\nname = "a"\nrole_arn = "arn:aws:iam::1:role/x"\n'


def test_all_errors_are_reported_at_once_with_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    """Nobody should have to start five times to find five mistakes."""
    found = problems(
        tmp_path,
        '[server]\nport = 70000\nworkers = 0\nhead_timeout = "soon"\nprot = 1\n'
        '[cache]\nblock_size = "3MiB"\n'
        f'{SLOT}[[slots]]\nname = "b"\nprefix = "train/"\n',
    )
    assert found["server.port"] == "server.port = 70000: a whole number 0 to 65535; 0 picks a free port"
    assert found["server.workers"] == "server.workers = 0: 1 to 256"
    assert found["server.head_timeout"] == "server.head_timeout = 'soon': 1s to 1h"
    assert found["server.prot"].startswith("server.prot is not a setting: did you mean port? known here: host, port,")
    assert found["cache.block_size"] == "cache.block_size = '3MiB': a power of two, 64KiB to 64MiB"
    assert found["slots[1].prefix"].startswith("slots[1].prefix = 'train/': s3://")
    assert len(found) == 6


def test_a_problem_names_where_its_value_came_from(tmp_path: Path) -> None:
    """The file, or the variable that stands in front of it; nothing, if nobody gave the value."""
    text = '[server]\nport = 70000\nhost = "0.0.0.0"\n[[slots]]\nname = "a"\n[[slots]]\nprefix = "b/"\nname = "b"\n'
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text, FOREBAY_SLOTS__1__PREFIX="c/", FOREBAY_SERVER__WORKERS="0")
    file = str(tmp_path / "forebay.toml")
    assert {problem.key: problem.source for problem in refused.value.problems} == {
        "server.port": file,
        "server.workers": "FOREBAY_SERVER__WORKERS",
        "slots[0].prefix": file,
        "slots[1].prefix": "FOREBAY_SLOTS__1__PREFIX",
    }
    messages = [str(problem) for problem in refused.value.problems]
    assert f"slots[0].prefix is missing (from {file}): s3://, s3://bucket/ or s3://bucket/prefix; unique" in messages
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, "[admin]\nport = 9000\n", AWS_ENDPOINT_URL="ftp://h")
    assert {problem.key: problem.source for problem in refused.value.problems} == {
        "admin.port": file,
        "origin.endpoint_url": "AWS_ENDPOINT_URL",
    }
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, '[[slots]]\nname = "a"\nprefix = "b/"\n', FOREBAY_SLOTS='[{"name": "a", "prefix": "c/"}]')
    assert [problem.source for problem in refused.value.problems] == ["FOREBAY_SLOTS"]
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, "[server]\nport = 9001\n")
    assert [(problem.key, problem.source) for problem in refused.value.problems] == [("admin.port", None)]


def test_traces_need_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said at the start, and nothing is asked of who traces nothing."""
    monkeypatch.setattr(checks, "_TRACING_PACKAGES", ("no_such_package.sdk",))
    found = problems(tmp_path, '[tracing]\nendpoint_url = "http://h:4318/v1/traces"\n')
    assert list(found) == ["tracing.endpoint_url"]
    assert "pip install '.[otel]' in a clone" in found["tracing.endpoint_url"]
    load(tmp_path, "[tracing]\nsample_ratio = 1\n")
    monkeypatch.setattr(checks, "_TRACING_PACKAGES", ("asyncio.tasks",))
    load(tmp_path, '[tracing]\nendpoint_url = "http://h:4318/v1/traces"\n')


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[server]\nhost = ""\n', "server.host"),
        ('[origin]\ndialect = "google"\n', "origin.dialect"),
        ('[server]\nbase_domains = ["S3.Local:9000"]\n', "server.base_domains[0]"),
        ("[server]\nhead_timeout = 0\n", "server.head_timeout"),
        ('[server]\nhead_timeout_seconds = "5s"\n', "server.head_timeout_seconds"),
        ('[server]\ncertificate_file = "/nowhere.pem"\n', "server.key_file"),
        ('[server]\ncertificate_file = "/dev/null"\nkey_file = "/nowhere.key"\n', "server.key_file"),
        ('[origin]\nendpoint_url = "s3.example"\n', "origin.endpoint_url"),
        ('[origin]\nendpoint_url = "http://h/path"\n', "origin.endpoint_url"),
        ('[origin]\nendpoint_url = "http://h:99999"\n', "origin.endpoint_url"),
        ('[origin]\naccess_key_id = "a"\n', "origin.secret_access_key"),
        ('[origin]\nsession_token = "t"\n', "origin.session_token"),
        ('[origin]\naccess_key_id = "a"\nsecret_access_key = "b"\nprofile = "p"\n', "origin.profile"),
        ('[origin]\nca_bundle = "/nowhere.pem"\n', "origin.ca_bundle"),
        ('[origin]\nproxy = "socks://h"\n', "origin.proxy"),
        ('[origin]\nread_bandwidth = "0B/s"\n', "origin.read_bandwidth"),
        ('[cache]\nblock_size = "32KiB"\n', "cache.block_size"),
        ('[cache]\nblock_size = "128MiB"\n', "cache.block_size"),
        ('[cache]\ncapacity = "16MiB"\n', "cache.capacity"),
        ('[logging]\nlevel = "loud"\n', "logging.level"),
        ('[logging]\naccess_file = "/nowhere/access"\n', "logging.access_file"),
        ('[logging]\naccess_file = "/dev/null"\n', "logging.access_file"),
        ('[logging]\naccess_file = "/tmp/one-log"\naudit_file = "/tmp/one-log"\n', "logging.access_file"),
        ('[logging]\naccess_file = "/tmp/one-log"\naudit_file = "/tmp/../tmp/one-log"\n', "logging.access_file"),
        ('[tracing]\nendpoint_url = "127.0.0.1:4318"\n', "tracing.endpoint_url"),
        ('[tracing]\nendpoint_url = "http://user:secret@h/v1/traces"\n', "tracing.endpoint_url"),
        ("[tracing]\nsample_ratio = 1.5\n", "tracing.sample_ratio"),
        ('[admin]\ntoken = "short"\n', "admin.token"),
        ("[admin]\nport = 9000\n", "admin.port"),
        ('[[credentials]]\naccess_key_id = "a"\nsecret_access_key = "b"\n', "credentials[0].allow"),
        ('[[credentials]]\naccess_key_id = "a"\nsecret_access_key = "b"\nallow = []\n', "credentials[0].allow"),
        ('[[credentials]]\naccess_key_id = "a"\nallow = ["s3://"]\n', "credentials[0].secret_access_key"),
        ('[[origin_credentials]]\nname = "a"\n', "origin_credentials[0] (a)"),
        (
            '[[origin_credentials]]\nname = "a"\nprofile = "p"\nrole_arn = "arn:aws:iam::1:role/x"\n',
            "origin_credentials[0] (a)",
        ),
        ('[[origin_credentials]]\nname = "a"\naccess_key_id = "k"\n', "origin_credentials[0].secret_access_key"),
        (
            '[[origin_credentials]]\nname = "a"\nprofile = "p"\nsession_token = "t"\n',
            "origin_credentials[0].session_token",
        ),
        (
            '[[origin_credentials]]\nname = "a"\nprofile = "p"\nexternal_id = "ex"\n',
            "origin_credentials[0].external_id",
        ),
        (
            '[[origin_credentials]]\nname = "a"\nprofile = "p"\nrole_duration = "1h"\n',
            "origin_credentials[0].role_duration",
        ),
        ('[[origin_credentials]]\nname = "a"\nrole_arn = "role/x"\n', "origin_credentials[0].role_arn"),
        (f"{ROLE}role_duration = '5m'\n", "origin_credentials[0].role_duration"),
        (f"{ROLE}role_session_name = 'a b'\n", "origin_credentials[0].role_session_name"),
        (f"{ROLE}sts_endpoint_url = 'sts.example'\n", "origin_credentials[0].sts_endpoint_url"),
        (f"{ROLE}sts_endpoint_url = 'http://127.0.0.1:9000'\n", "origin_credentials[0].sts_endpoint_url"),
        (f"{ROLE}web_identity_token_file = '/nowhere'\n", "origin_credentials[0].web_identity_token_file"),
        (
            f"{ROLE}web_identity_token_file = '/dev/null'\nsource_profile = 'p'\n",
            "origin_credentials[0].source_profile",
        ),
        (f"{ROLE}web_identity_token_file = '/dev/null'\nexternal_id = 'ex'\n", "origin_credentials[0].external_id"),
        ('[[buckets]]\nname = "a/b"\n', "buckets[0].name"),
        ('[[buckets]]\nname = "b"\n[[buckets]]\nname = "b"\n', "buckets[1].name"),
        ('[[buckets]]\nname = "b"\nendpoint_url = "b.example"\n', "buckets[0].endpoint_url"),
        ('[[buckets]]\nname = "b"\nendpoint_url = "http://127.0.0.1:9000"\n', "buckets[0].endpoint_url"),
        ('[[buckets]]\nname = "b"\nca_bundle = "/nowhere.pem"\n', "buckets[0].ca_bundle"),
        ('[[buckets]]\nname = "b"\norigin_credentials = "x"\n', "buckets[0].origin_credentials"),
        (f'{SLOT}origin_credentials = "x"\n', "slots[0].origin_credentials"),
        ('[[slots]]\nname = "default"\nprefix = "s3://b/"\n', "slots[0].name"),
        ('[[slots]]\nname = "none"\nprefix = "s3://b/"\n', "slots[0].name"),
        ('[[slots]]\nname = "(gone)"\nprefix = "s3://b/"\n', "slots[0].name"),
        ('[[slots]]\nname = "a b"\nprefix = "s3://b/"\n', "slots[0].name"),
        (f'{SLOT}mode = "rw"\n', "slots[0].mode"),
        (f'{SLOT}authorization = "bucket"\n', "slots[0].authorization"),
        (f'{SLOT}authorization_ttl = "1s"\n', "slots[0].authorization_ttl"),
        (f"{SLOT}weight = 0\n", "slots[0].weight"),
        (f'{SLOT}index_refresh = "1h"\n', "slots[0].index_refresh"),
        (f"{SLOT}index_concurrency = 4\n", "slots[0].index_concurrency"),
        (f'{SLOT}index_inventory = "s3://c/m"\n', "slots[0].index_inventory"),
        (
            '[cache]\ncapacity = "1GiB"\n[[slots]]\nname = "a"\nprefix = "s3://b/"\ncapacity = "2GiB"\n',
            "slots[].capacity",
        ),
        (f'[cache]\ncapacity = "4GiB"\n{SLOT}capacity = "2GiB"\ncapacity_limit = "1GiB"\n', "slots[0].capacity_limit"),
        (
            f'[cache]\ncapacity = "4GiB"\nblock_size = "8MiB"\n{SLOT}capacity_limit = "60MiB"\n',
            "slots[0].capacity_limit",
        ),
        (
            '[cache]\ncapacity = "256MiB"\n[[slots]]\nname = "a"\nprefix = "s3://b/"\nblock_size = "64MiB"\n',
            "cache.capacity",
        ),
        (f'{SLOT}block_size = "3MiB"\n', "slots[0].block_size"),
        (f'{SLOT}block_size = "32KiB"\n', "slots[0].block_size"),
        ('[cache]\nsmall_object_max = "2MiB"\n', "cache.small_object_max"),
        ("server = 5\n", "server"),
        ("[slots]\n", "slots"),
        ("not toml", "config"),
    ],
)
def test_what_cannot_be_is_refused_under_its_own_key(tmp_path: Path, text: str, key: str) -> None:
    """One mistake, one error, naming the key as it stands in the file."""
    assert list(problems(tmp_path, text)) == [key]


def test_an_unknown_policy_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    """Each word that is allowed is named."""
    slot = f"{SLOT}eviction = "
    [told] = problems(tmp_path, slot + '"fifo"\n').values()
    assert told == "slots[0].eviction = 'fifo': epoch or lru"


def test_a_pattern_of_checkpoints_that_is_none_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Under its own place in the list; only where writes are absorbed at all; an empty list is none."""
    slot = SLOT
    text = f'{slot}checkpoints = ["built-in", "a*b*/", "x/{{step}}/", "a/**"]\n'
    found = problems(tmp_path, text)
    assert list(found) == ["slots[0].checkpoints[1]", "slots[0].checkpoints[3]"]
    assert found["slots[0].checkpoints[1]"].startswith("slots[0].checkpoints[1] = 'a*b*/': * may stand once")
    assert list(problems(tmp_path, f'{slot}checkpoints = ["x/{{step}}/"]\n')) == ["slots[0].checkpoints"]
    back = f'[cache]\npersistent = true\ndirectory = "{tmp_path}/cache"\n{slot}write = "back"\ncheckpoints = '
    [settings] = load(tmp_path, f'{back}["built-in", "x/{{step}}/"]\n').settings.slots
    assert settings.checkpoints == ("built-in", "x/{step}/")
    [settings] = load(tmp_path, f"{back}[]\n").settings.slots
    assert settings.checkpoints == ()


def test_so_many_patterns_of_checkpoints_are_refused(tmp_path: Path) -> None:
    """As each key that is written is held against all of them."""
    back = f'[cache]\npersistent = true\ndirectory = "{tmp_path}/cache"\n[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
    back += 'write = "back"\ncheckpoints = '
    deep = [f"a{number}-x/**/{'x/' * 7}s-{{step}}/" for number in range(8)]
    load(tmp_path, f"{back}{orjson.dumps(deep).decode()}\n")
    [told] = problems(tmp_path, f"{back}{orjson.dumps([*deep, '**/y/']).decode()}\n").values()
    assert "65 parts stand between a ** and the checkpoint's own, which counts, too: 64 at most" in told
    many = orjson.dumps([f"a{number}-x/" for number in range(65)]).decode()
    [told] = problems(tmp_path, f"{back}{many}\n").values()
    assert "65 patterns: a slot has 64 at most" in told


@pytest.mark.parametrize("key_id", RESERVED_CALLERS)
def test_no_credential_is_called_like_somebody_else(tmp_path: Path, key_id: str) -> None:
    """Metrics and the audit log call so whose signature does not hold, who is unsigned, operators, and the like."""
    text = f'[[credentials]]\naccess_key_id = "{key_id}"\nsecret_access_key = "s"\nallow = ["s3://"]\n'
    found = problems(tmp_path, text)
    assert found.keys() == {"credentials[0].access_key_id"}
    assert f"'{key_id}': reserved, like none, anonymous," in found["credentials[0].access_key_id"]


def test_names_prefixes_and_key_ids_are_unique(tmp_path: Path) -> None:
    """Two entries that claim the same are a mistake, not a preference."""
    slot = SLOT
    credential = '[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "x"\nallow = ["s3://"]\n'
    found = problems(tmp_path, slot + slot + credential + credential)
    assert set(found) == {"slots[1].name", "slots[1].prefix", "credentials[1].access_key_id"}


def test_write_back_needs_a_directory_that_lasts_and_a_slot_that_takes_writes(tmp_path: Path) -> None:
    """The directory holds the only copy of what is acknowledged; the message says what declares that it may."""
    slot = f'{SLOT}write = "back"\n'
    assert "cache.persistent = true" in problems(tmp_path, slot)["slots[0].write"]
    lasting = f"[cache]\npersistent = true\n{slot}"
    assert set(problems(tmp_path, f"{lasting}mode = 'read-only'\n")) == {"slots[0].write"}
    assert set(problems(tmp_path, f"{lasting}weight = 0\n")) == {"slots[0].weight"}


def test_a_frozen_slot_names_its_snapshot_and_takes_no_writes(tmp_path: Path) -> None:
    """What does not go together is refused, each with what is allowed."""
    slot = SLOT
    frozen = f'{slot}consistency = "snapshot"\n'
    found = problems(tmp_path, f'{frozen}mode = "read-write"\n')
    assert "forebay snapshot create" in found["slots[0].snapshot"]
    assert "read-only" in found["slots[0].mode"]
    assert "needs consistency" in problems(tmp_path, f'{slot}snapshot = "v1"\n')["slots[0].snapshot"]
    everything = frozen.replace("s3://b/", "s3://") + 'snapshot = "v1"\n'
    assert "s3://bucket/prefix" in problems(tmp_path, everything)["slots[0].prefix"]
    for name in ("", "../v1", ".v1", "a/b", "a" * 65):
        assert "slots[0].snapshot" in problems(tmp_path, f'{frozen}snapshot = "{name}"\n')


@pytest.mark.parametrize("name", ["v1", "a" * 64, "0.-_", "-", ".", "a b", "", "a" * 65, "a/b", "é"])
def test_the_settings_take_the_names_that_snapshots_may_have(tmp_path: Path, name: str) -> None:
    """Neither more nor less; and a frozen slot is read-only without being told so."""
    text = f'[[slots]]\nname = "a"\nprefix = "s3://b/"\nconsistency = "snapshot"\nsnapshot = "{name}"\n'
    try:
        valid_name(name)
    except ValueError:
        assert set(problems(tmp_path, text)) == {"slots[0].snapshot"}
    else:
        (slot,) = load(tmp_path, text).settings.slots
        assert (slot.snapshot, slot.mode, slot.consistency) == (name, "read-only", "snapshot")


def test_settings_that_are_in_force_are_not_warned_of(tmp_path: Path) -> None:
    """Nothing is silently ignored: each of them does something."""
    text = to_toml(
        {
            "origin": {"read_bandwidth": "1GiB/s"},
            "cache": {"capacity": "1GiB"},
            "slots": [
                {
                    "name": "a",
                    "prefix": "s3://a/",
                    "consistency": "immutable",
                    "metadata_ttl": "60s",
                    "negative_ttl": "5s",
                    "capacity": "100MiB",
                    "capacity_limit": "200MiB",
                    "eviction": "epoch",
                    "read_bandwidth": "1GiB/s",
                    "write_bandwidth": "1GiB/s",
                    "weight": 4,
                },
                {
                    "name": "b",
                    "prefix": "s3://b/",
                    "mode": "read-only",
                    "consistency": "strict",
                    "write": "through",
                    "weight": 1,
                    "negative_ttl": "0s",
                },
            ],
        }
    )
    assert load(tmp_path, text).warnings == ()


def test_what_is_not_to_be_sent_is_said_where_it_may_be(tmp_path: Path) -> None:
    """`flush` and `keep_last` are for write = back, `scratch_expiry` where something is not sent; a strict order
    leaves out nothing, and in scratch nothing goes through."""
    cache = f'[cache]\npersistent = true\ndirectory = "{tmp_path}/cache"\n'
    slot = f'{cache}[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
    back, scratch = f'{slot}write = "back"\n', f'{slot}write = "scratch"\n'
    for right in ('flush = "latest"\nscratch_expiry = "1h"\nkeep_last = 2\n', 'flush = "every-22nd"\n'):
        assert load(tmp_path, back + right).settings.slots[0].is_buffered
    loaded = load(tmp_path, f'{scratch}scratch_expiry = "1h"\nbuffer = "10MiB"\n').settings.slots[0]
    assert (loaded.write, loaded.scratch_expiry_seconds) == ("scratch", 3600.0)
    for wrong in (
        'flush = "latest"',
        "keep_last = 2",
        'max_unflushed_bytes = "1GiB"',
        'when_buffer_full = "through"',
        'order = "strict"',
    ):
        assert set(problems(tmp_path, scratch + wrong)) == {f"slots[0].{wrong.split(' ')[0]}"}
    for wrong in (
        'flush = "every-1st"',
        'flush = "some"',
        'scratch_expiry = "1h"',
        'flush = "latest"\norder = "strict"',
    ):
        assert set(problems(tmp_path, back + wrong)) == {f"slots[0].{wrong.split(' ')[0]}"}
    assert set(problems(tmp_path, f'{slot}scratch_expiry = "1h"')) == {"slots[0].scratch_expiry"}


def test_a_weight_without_a_link_to_share_is_warned_of(tmp_path: Path) -> None:
    """Nobody knows what there is to be shared; either direction is enough."""
    slot = '[[slots]]\nname = "a"\nprefix = "s3://a/"\nweight = 2\n'
    [warning] = load(tmp_path, slot).warnings
    assert "slots[0].weight" in warning
    assert "origin.read_bandwidth" in warning
    assert not load(tmp_path, f'[origin]\nwrite_bandwidth = "1GiB/s"\n{slot}').warnings


def test_a_slot_whose_callers_the_origin_judges_writes_through(tmp_path: Path) -> None:
    """And needs callers with keys of their own; its time has bounds."""
    slot = '[[slots]]\nname = "a"\nprefix = "s3://a/"\nauthorization = "origin"\n'
    caller = '[[credentials]]\naccess_key_id = "a"\nsecret_access_key = "b"\nallow = ["s3://"]\n'
    [warning] = load(tmp_path, slot).warnings
    assert "slots[0].authorization" in warning
    assert "[[credentials]]" in warning
    loaded = load(tmp_path, f'{caller}session_token = "a-token"\n{slot}authorization_ttl = "1h"\n')
    assert not loaded.warnings
    assert "a-token" not in repr(loaded.settings)
    assert "a-token" not in str(public_settings(loaded.settings))
    found = problems(tmp_path, f'[cache]\npersistent = true\n{caller}{slot}write = "back"\n')
    assert 'write = "through"' in found["slots[0].authorization"]
    assert "slots[0].authorization_ttl" in problems(tmp_path, f'{caller}{slot}authorization_ttl = "61m"\n')


@pytest.mark.parametrize("direction", ["read", "write"])
def test_what_the_link_bears_can_be_left_to_be_found_out(tmp_path: Path, direction: str) -> None:
    """Guarantees are taken then, with a warning that nobody can check them; anything else is refused by name."""
    slot = f'[[slots]]\nname = "a"\nprefix = "s3://a/"\n{direction}_guarantee = "10GiB/s"\n'
    (warning,) = load(tmp_path, f'[origin]\n{direction}_bandwidth = "auto"\n{slot}').warnings
    assert warning.startswith(f"slots[0].{direction}_guarantee goes first")
    for wrong in ('"automatic"', "true", '"1KiB/s"', '"Auto"'):
        found = problems(tmp_path, f"[origin]\n{direction}_bandwidth = {wrong}\n")
        assert 'or "auto"' in found[f"origin.{direction}_bandwidth"]
    slot = f'[[slots]]\nname = "a"\nprefix = "s3://a/"\n{direction}_bandwidth = "auto"\n'
    assert f"slots[0].{direction}_bandwidth" in problems(tmp_path, slot)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_guarantee_that_nobody_can_keep_is_refused(tmp_path: Path, direction: str) -> None:
    """Without a link's capacity, above the slot's own ceiling, together above what the link bears."""

    def slot(name: str, guarantee: str, ceiling: str = "100MiB/s") -> str:
        ceilings = f'{direction}_bandwidth = "{ceiling}"\n{direction}_guarantee = "{guarantee}"\n'
        return f'[[slots]]\nname = "{name}"\nprefix = "s3://{name}/"\n{ceilings}'

    link = f'[origin]\n{direction}_bandwidth = "100MiB/s"\n'
    key = f"slots[0].{direction}_guarantee"
    assert load(tmp_path, link + slot("a", "60MiB/s") + slot("b", "40MiB/s")).warnings == ()
    found = problems(tmp_path, slot("a", "1MiB/s"))
    assert found[key] == f"{key} = '1MiB/s': needs origin.{direction}_bandwidth: what the link bears"
    found = problems(tmp_path, link + slot("a", "2MiB/s", "1MiB/s"))
    assert found[key] == f"{key} = '2MiB/s': at most the slot's {direction}_bandwidth, 1MiB/s"
    found = problems(tmp_path, link + slot("a", "60MiB/s") + slot("b", "41MiB/s"))
    key = f"slots[].{direction}_guarantee"
    allowed = f"all slots together may have at most origin.{direction}_bandwidth, 100MiB/s"
    assert found == {key: f"{key} = '101MiB/s': {allowed}"}


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_ceiling_too_low_to_work_under_is_refused(tmp_path: Path, direction: str) -> None:
    """Of the link or of a slot: with its key, its value and what is allowed."""
    key = f"{direction}_bandwidth"
    text = f'[origin]\n{key} = "63KiB/s"\n[[slots]]\nname = "a"\nprefix = "s3://a/"\n{key} = 65535\n'
    found = problems(tmp_path, text)
    assert found[f"origin.{key}"].startswith(f"origin.{key} = '63KiB/s': at least 64KiB/s")
    assert found[f"slots[0].{key}"].startswith(f"slots[0].{key} = 65535: at least 64KiB/s")
    assert load(tmp_path, f'[origin]\n{key} = "64KiB/s"\n').warnings == ()


@pytest.mark.parametrize(
    ("slot", "key", "why"),
    [
        ({"consistency": "strict"}, "index", "consistency = ttl or immutable"),
        ({}, "index", "with strict"),
        ({"mode": "read-only", "prefix": "s3://"}, "index", "names a bucket"),
        ({"mode": "read-only", "index_refresh": "90s"}, "index_refresh", "at most metadata_ttl, 1m"),
        ({"mode": "read-only", "metadata_ttl": "1s"}, "metadata_ttl", "at least 2s"),
        ({"consistency": "immutable", "index_inventory": "s3://bucket"}, "index_inventory", "manifest.json"),
    ],
)
def test_an_index_that_could_answer_nothing_is_refused(
    tmp_path: Path, slot: dict[str, object], key: str, why: str
) -> None:
    """Where LIST always asks the origin, where no bucket is named, where it would be too old before the next crawl."""
    found = problems(tmp_path, to_toml({"slots": [{"name": "a", "prefix": "s3://b/", "index": True} | slot]}))
    assert list(found) == [f"slots[0].{key}"]
    assert why in found[f"slots[0].{key}"]


@pytest.mark.parametrize(
    ("slot", "refresh_seconds"),
    [
        ({"mode": "read-only"}, 30.0),
        ({"consistency": "ttl", "metadata_ttl": "1h", "index_refresh": "1h"}, 3600.0),
        ({"consistency": "immutable"}, None),
        ({"consistency": "immutable", "index_refresh": "1d"}, 86_400.0),
    ],
)
def test_how_often_an_index_is_crawled(tmp_path: Path, slot: dict[str, object], refresh_seconds: float | None) -> None:
    """What is not said: twice in metadata_ttl, and once where nothing changes."""
    loaded = load(tmp_path, to_toml({"slots": [{"name": "a", "prefix": "s3://b/", "index": True} | slot]}))
    assert loaded.settings.slots[0].index_refresh_in_force_seconds == refresh_seconds
