import pytest

from tamis.errors import ConfigError
from tamis.server.auth import ApiKeys, cache_salt
from tamis.server.config import ServerConfig
from tamis.server.errors import ApiError


def test_without_keys_everybody_is_answered() -> None:
    assert ApiKeys(()).check(None) == ApiKeys(()).check(b"Bearer whatever") == ""


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"Bearer  one "])
def test_a_key_is_a_bearer_token(header: bytes) -> None:
    assert ApiKeys(("one", "two")).check(header)


@pytest.mark.parametrize(
    "header", [None, b"", b"one", b"Basic one", b"Bearer", b"Bearer on", b"Bearer one2", b"\xff \xfe"]
)
def test_anything_else_is_refused_without_telling_the_keys(header: bytes | None) -> None:
    with pytest.raises(ApiError) as caught:
        ApiKeys(("one", "two")).check(header)
    assert caught.value.status == 401
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert "two" not in str(caught.value)


def test_tenants_and_salts_never_share_pages() -> None:
    keys = ApiKeys(("one", "two"))
    one, two = keys.check(b"Bearer one"), keys.check(b"Bearer two")
    salts = [cache_salt(tenant, asked) for tenant in ("", one, two) for asked in (None, "a", "b")]
    assert len(set(salts)) == 9
    assert cache_salt("", None) == cache_salt("", "") == ""
    assert "one" not in "".join(salts)


def test_a_salt_cannot_pass_for_a_tenant() -> None:
    tenant = ApiKeys(("one",)).check(b"Bearer one")
    assert cache_salt("", f"{tenant}:a") != cache_salt(tenant, "a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 70000}, "port=70000"),
        ({"max_body": 0}, "max_body=0"),
        ({"header_timeout": -1}, "header_timeout=-1"),
        ({"drain": -1}, "drain=-1"),
        ({"max_body": 2 << 30}, "max_bodies=256.0 MiB is less than max_body=2.0 GiB"),
        ({"api_keys": ("",)}, "API key"),
        ({"api_keys": ("a\nb",)}, "API key"),
        ({"cors_origins": ("example.org",)}, "cors_origin='example.org'"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**fields)  # type: ignore[arg-type]
