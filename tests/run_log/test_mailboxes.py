"""Mailboxes of runs in files and databases: many posters, dead posters, and what is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from clark_agent.errors import RunNotFound, RunStoreError
from clark_agent.run_log import _mail_file
from clark_agent.run_log._files import open_file, try_lock
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.sqlite import SqliteStore
from tests.run_log.storing import (
    KINDS,
    append,
    child,
    line_from,
    mail_to,
    open_store,
    some_records,
    tell,
    writing,
)

both = pytest.mark.parametrize("kind", KINDS)


def store_with_a_box(kind: str, folder: Path) -> JsonlStore | SqliteStore:
    store = open_store(kind, folder)
    with writing(store.create("box")) as appender:
        append(appender, some_records("box", 1))
    return store


@pytest.mark.slow
@both
def test_processes_post_at_once(kind: str, tmp_path: Path) -> None:
    store = store_with_a_box(kind, tmp_path)
    names = ("a", "b", "c")
    with (
        child("post_many", kind, tmp_path, "a", 40) as a,
        child("post_many", kind, tmp_path, "b", 40) as b,
        child("post_many", kind, tmp_path, "c", 40) as c,
    ):
        for process in (a, b, c):
            tell(process)
        said = [line_from(process).split() for process in (a, b, c)]
    assert [own for own, _ in said] == ["40"] * 3
    assert sum([int(same) for _, same in said]) == 40
    ids = [mail.id for mail in store.mail("box")]
    assert len(ids) == 4 * 40
    for name in (*names, "same"):
        own = [mail_id for mail_id in ids if mail_id.startswith(f"{name} ")]
        assert own == [f"{name} {n}" for n in range(40)]


@pytest.mark.slow
@both
def test_a_killed_poster_loses_nothing_that_it_posted(kind: str, tmp_path: Path) -> None:
    store = store_with_a_box(kind, tmp_path)
    with child("post_forever", kind, tmp_path) as process:
        told = [line_from(process) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
    assert [mail.id for mail in store.mail("box")][: len(told)] == told
    assert store.post("box", mail_to("next"))
    *posted, last = store.mail("box")
    assert posted == [mail_to(mail.id, "x" * 20_000) for mail in posted]
    assert last == mail_to("next")


def test_one_process_posts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with_a_box("jsonl", tmp_path)
    assert store.post("box", mail_to("1"))
    monkeypatch.setattr(_mail_file, "_PATIENCE", 0.01)
    with open_file(tmp_path / "runs" / "box.mail") as file:
        assert try_lock(file)
        with pytest.raises(RunStoreError, match="the mailbox of the run 'box' stays locked"):
            store.post("box", mail_to("2"))
    assert store.post("box", mail_to("2"))
    assert [mail.id for mail in store.mail("box")] == ["1", "2"]


def test_the_rest_of_a_killed_poster_is_replaced(tmp_path: Path) -> None:
    store = store_with_a_box("jsonl", tmp_path)
    assert store.post("box", mail_to("1"))
    path = tmp_path / "runs" / "box.mail"
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for end in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole.replace(b'"1"', b'"2"')[:end])
        assert store.mail("box") == [mail_to("1")]
        assert store.mail("box", after=1) == []
    other = JsonlStore(tmp_path / "runs")
    assert other.post("box", mail_to("2"))
    assert store.mail("box", after=1) == [mail_to("2")]
    assert not other.post("box", mail_to("2"))
    assert path.read_bytes().count(b"\n") == 2


def test_a_message_may_replace_a_torn_one_of_its_size(tmp_path: Path) -> None:
    store = store_with_a_box("jsonl", tmp_path)
    store.post("box", mail_to("1"))
    path = tmp_path / "runs" / "box.mail"
    path.write_bytes(path.read_bytes() + b"x" * len(path.read_bytes()))
    assert [mail.id for mail in store.mail("box")] == ["1"]
    store.post("box", mail_to("2"))
    assert [mail.id for mail in store.mail("box", after=1)] == ["2"]


def test_a_mailbox_without_news_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with_a_box("jsonl", tmp_path)
    store.post("box", mail_to("1"))
    assert [mail.id for mail in store.mail("box")] == ["1"]
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    assert list(store.mail("box", after=1)) == []
    assert list(store.mail("nobody")) == []
    assert read == []
    store.post("box", mail_to("2"))
    assert [mail.id for mail in store.mail("box", after=1)] == ["2"]
    assert len(read) == 1


@both
def test_a_damaged_mailbox_is_an_error(kind: str, tmp_path: Path) -> None:
    store = store_with_a_box(kind, tmp_path)
    store.post("box", mail_to("1"))
    if isinstance(store, JsonlStore):
        path = tmp_path / "runs" / "box.mail"
        path.write_bytes(path.read_bytes().replace(b'"steer"', b'"dance"'))
    else:
        with store._connections.writing() as connection:
            connection.execute("UPDATE mails SET data = replace(data, 'steer', 'dance')")
    with pytest.raises(RunStoreError, match="the mailbox of the run 'box' is damaged"):
        store.mail("box")


@both
def test_what_json_cannot_hold_is_described(kind: str, tmp_path: Path) -> None:
    store = store_with_a_box(kind, tmp_path)
    odd = Mail(id="\ud800 é", kind="event", at=1, name="n", payload={"x": {1, 2} and object})
    assert store.post("box", odd)
    assert not store.post("box", odd)
    (kept,) = store.mail("box")
    assert (kept.id, kept.name) == ("� é", "n")
    assert "object" in kept.payload["x"]


@both
def test_a_run_that_does_not_exist_has_no_mailbox(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    appender = store.create("early")
    for run_id in ("nobody", "early"):
        with pytest.raises(RunNotFound):
            store.post(run_id, mail_to("1"))
        with pytest.raises(RunNotFound):
            store.tail(run_id)
        assert list(store.mail(run_id)) == []
    appender.close()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".mail", ".live")]
