"""``helix_sessions``: lists, pages and changes, on every database."""

from __future__ import annotations

import re
import signal
from typing import Any, Final

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.core import moments
from helix_store.core.contracts import SESSION_FILTERS
from helix_store.management.output import ProgressBar, width_of
from helix_store.models import Checkpoint, Message, Session
from helix_store.stores import DatabaseStateStore
from tests.cells import Cells, for_each
from tests.commands.running import Ended, read_by_a_program, run
from tests.commands.sample import SAMPLE_ID, write_sample
from tests.commands.test_help_examples import PARSERS
from tests.databases import CommittedDatabase

HEAD_KEYS = {
    "tenant",
    "session_id",
    "agent_type",
    "status",
    "version",
    "step_count",
    "resume_count",
    "mode",
    "failure_reason",
    "user_id",
    "tags",
    "metadata",
    "title",
    "workspace_id",
    "directory",
    "parent_session_id",
    "root_session_id",
    "stream_id",
    "message_count",
    "suspension_kind",
    "suspended_step_id",
    "expires_at",
    "created_at",
    "updated_at",
}


@pytest.fixture
def sample(empty_db: CommittedDatabase) -> CommittedDatabase:
    """The sample in the tenant of the test, and another one in the tenant ""."""
    write_sample(empty_db.alias, tenant=empty_db.tenant)
    write_sample(empty_db.alias)
    return empty_db


def sessions(database: CommittedDatabase, *arguments: str, **options: Any) -> Ended:
    return run(database.alias, "helix_sessions", *arguments, **options)


def listed(database: CommittedDatabase, *arguments: str) -> list[tuple[str, str]]:
    data = sessions(database, "list", "--format", "json", *arguments).data
    return [(head["tenant"], head["session_id"]) for head in data["sessions"]]


def store_of(database: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(database.alias, tenant=database.tenant)


# --- list


def test_a_list_has_every_tenant_or_one(sample: CommittedDatabase) -> None:
    hotels = f"{SAMPLE_ID}-hotels"
    own = [(sample.tenant, SAMPLE_ID), (sample.tenant, hotels)]
    assert sorted(listed(sample)) == sorted([*own, ("", SAMPLE_ID), ("", hotels)])
    assert sorted(listed(sample, "--tenant", sample.tenant)) == own
    assert sorted(listed(sample, "--tenant", "")) == [("", SAMPLE_ID), ("", hotels)]
    assert listed(sample, "--tenant", "nobody") == []


def test_the_json_of_a_list_has_its_keys(sample: CommittedDatabase) -> None:
    data = read_by_a_program(sessions(sample, "list", "--format", "json", "--count").out)
    assert data.keys() == {"sessions", "total", "next_cursor"}
    assert [head.keys() for head in data["sessions"]] == [HEAD_KEYS | {"conversation", "stuck"}] * 4
    assert (data["total"], data["next_cursor"]) == (4, None)


@pytest.mark.parametrize("tenants", ["one", "all"])
def test_every_filter_filters(tenants: str, empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    store.create_session("other", agent_type="other")
    wanted = store.create_session(
        "wanted",
        agent_type="travel",
        user_id="user-7",
        tags=["a", "b"],
        metadata={"k": "v=1", "l": "w"},
        workspace_id="work-1",
    )
    store.update_status("wanted", "failed")
    store.create_session("child", agent_type="other", parent_session_id="other")
    moment = wanted.created_at
    assert moment is not None
    tenant = ["--tenant", empty_db.tenant] if tenants == "one" else []
    filters = [
        ["--agent-type", "travel"],
        ["--status", "failed"],
        ["--status", "failed", "--status", "completed"],
        ["--user", "user-7"],
        ["--roots", "--tag", "a"],
        ["--root", "wanted"],
        ["--workspace", "work-1"],
        ["--tag", "a", "--tag", "b"],
        ["--metadata", "k=v=1", "--metadata", "l=w"],
        ["--created-from", moment.isoformat(), "--tag", "b"],
    ]
    for chosen in filters:
        assert listed(empty_db, *tenant, *chosen) == [(empty_db.tenant, "wanted")], chosen
    assert listed(empty_db, *tenant, "--parent", "other") == [(empty_db.tenant, "child")]
    assert listed(empty_db, *tenant, "--created-to", moment.isoformat()) == [(empty_db.tenant, "other")]
    by_creation = listed(empty_db, *tenant, "--order-by", "created_at", "--direction", "asc")
    assert [session_id for _, session_id in by_creation] == ["other", "wanted", "child"]
    assert listed(empty_db, *tenant, "--order-by", "created_at", "--offset", "2") == [
        (empty_db.tenant, "other")
    ]


@pytest.mark.parametrize("is_ascending", [True, False])
def test_pages_continue_across_tenants(is_ascending: bool, empty_db: CommittedDatabase) -> None:
    for tenant in ("a", "b", "c"):
        for number in range(3):
            DatabaseStateStore(empty_db.alias, tenant=tenant).create_session(
                f"session-{number}", agent_type="agent"
            )
    # Equal times are ordered by session id, then tenant.
    Session.objects.using(empty_db.alias).update(updated_at=moments.now())
    order = ["--direction", "asc"] if is_ascending else []
    whole = listed(empty_db, *order)
    by_id = sorted(whole, key=lambda found: (found[1], found[0]), reverse=not is_ascending)
    assert whole == by_id
    assert len(set(whole)) == 9
    collected: list[tuple[str, str]] = []
    cursor: list[str] = []
    while True:
        data = sessions(empty_db, "list", "--format", "json", "--limit", "2", *order, *cursor).data
        collected += [(head["tenant"], head["session_id"]) for head in data["sessions"]]
        if data["next_cursor"] is None:
            break
        cursor = ["--cursor", data["next_cursor"]]
    assert collected == whole
    other = sessions(empty_db, "list", "--user", "user-1", *order, *cursor)
    assert other.code == 2
    both = sessions(empty_db, "list", "--offset", "1", *order, *cursor)
    assert both.code == 2


@pytest.mark.thorough
def test_a_list_of_more_than_a_page_is_read_in_pages(empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    for number in range(203):
        store.create_session(f"session-{number}", agent_type="agent")
    with CaptureQueriesContext(connections[empty_db.alias]) as queries:
        assert len(set(listed(empty_db, "--limit", "1000"))) == 203
    # For each page: the sessions, their keys, and the adapters that have rows of them; their keys and
    # conditions.
    assert len(queries) == 10
    ended = sessions(empty_db, "list", "--limit", "1000")
    assert len(ended.lines) == 204
    assert ended.lines[0].split()[0] == "session"


@pytest.mark.thorough
def test_a_signal_stops_a_list_after_the_page(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(empty_db)
    for number in range(203):
        store.create_session(f"session-{number}", agent_type="agent")
    monkeypatch.setattr(ProgressBar, "update", lambda bar, done: signal.raise_signal(signal.SIGTERM))
    ended = sessions(empty_db, "list", "--limit", "1000", "--format", "json")
    assert "Stopped after 200 sessions; --cursor continues." in ended.err
    monkeypatch.undo()
    rest = listed(empty_db, "--cursor", ended.data["next_cursor"])
    first = [(head["tenant"], head["session_id"]) for head in ended.data["sessions"]]
    assert len({*first, *rest}) == len(first) + len(rest) == 203


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal(
    columns: int, sample: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long_id = "long-" + "0123456789" * 12
    store_of(sample).create_session(long_id, agent_type="旅行代理店" * 8, user_id="u" * 200)
    ended = sessions(sample, "list")
    assert max(map(width_of, ended.lines)) <= columns
    assert long_id not in ended.out
    assert "…" in ended.out
    assert re.search(r"(UTC|-05:00)$", ended.lines[1])
    wide = sessions(sample, "list", "--wide")
    assert long_id in wide.out
    assert "…" not in wide.out
    shown = sessions(sample, "show", SAMPLE_ID, "--tenant", "", "--messages", "20")
    assert max(map(width_of, shown.lines)) <= columns


def test_a_list_shows_titles_first_and_no_empty_columns(
    empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    store = DatabaseStateStore(empty_db.alias)
    store.create_session("session-0123456789-0123456789", agent_type="travel")
    assert sessions(empty_db, "list").lines[0].split()[0] == "session"
    store.create_session("trip-1", agent_type="travel", title="A trip to São Paulo, with two hotels")
    headings, newest, _ = sessions(empty_db, "list").lines
    # The heading of the agent type may be cut: a zone without a name has a longer time.
    shown = headings.split()
    assert [*shown[:3], *shown[4:]] == ["title", "session", "agent", "status", "steps", "updated"]
    assert newest.startswith("A trip to")
    assert max(map(width_of, (headings, newest))) <= 80
    store_of(empty_db).create_session("other", agent_type="travel", user_id="user-1")
    wide = sessions(empty_db, "list", "--wide").lines
    assert wide[0].split()[:3] == ["title", "session", "tenant"]
    assert wide[1].split()[:3] == ["-", "other", empty_db.tenant]
    assert "A trip to São Paulo, with two hotels  trip-1" in wide[2]


def test_colours_are_for_terminals(sample: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in sessions(sample, "list").out
    assert "\x1b[" not in sessions(sample, "show", SAMPLE_ID, "--tenant", "", "--messages", "9").out
    assert "\x1b[36mactive\x1b[0m" in sessions(sample, "list", "--force-color").out
    assert "\x1b[" not in sessions(sample, "list", "--no-color", terminal=True).out


def test_stored_text_moves_no_cursor(empty_db: CommittedDatabase) -> None:
    evil = "\x1b[2J\x9b31m\u202e\r\n\b"
    store = store_of(empty_db)
    session_id, name = "evil-\u202e", "name-\u202e"
    state = store.create_session(session_id, agent_type=name, title=evil, user_id=name, tags=[evil])
    state.custom_state = {evil: evil}
    state.failure_reason = evil
    step = {"step_id": name, "step_count": 1}
    store.save_state_and_promote_staging(session_id, state, [{"role": name, "content": evil}], step)
    store.add_sub_session_refs(session_id, [{"sub_session_id": name, "agent_type": name, "status": name}])
    # Text that the store would have refused.
    Session.objects.using(empty_db.alias).update(agent_type=evil, user_id=evil, workspace_id=evil)
    shown = [
        sessions(empty_db, "list"),
        sessions(empty_db, "show", session_id, "--messages", "5"),
        sessions(empty_db, "tree", session_id),
        sessions(empty_db, "set-status", session_id, "paused", "--reason", evil),
        run(empty_db.alias, "helix_checkpoints", "list", session_id),
        run(empty_db.alias, "helix_checkpoints", "show", session_id),
        run(empty_db.alias, "helix_checkpoints", "diff", session_id, f"{session_id}@current"),
    ]
    for ended in shown:
        assert ended.code == 0, ended.err
        assert "evil-" in ended.out
        assert not set(ended.out) & set("\x1b\x9b\u202e\r\b")


@for_each(
    "arguments",
    [
        ["list", "--limit", "0"],
        ["list", "--offset", "-1"],
        ["list", "--status", "lost"],
        ["list", "--cursor", "forged"],
        ["list", "--metadata", "no value"],
        ["list", "--created-from", "yesterday"],
        ["list", "--parent", "a", "--roots"],
        ["list", "--tenant", "\x00"],
        ["list", "--user", "\x00"],
        ["show"],
        ["show", ""],
        ["show", SAMPLE_ID],
        ["show", SAMPLE_ID, "--messages", "0"],
        ["tree", SAMPLE_ID],
        ["set-status", SAMPLE_ID, "completed"],
        ["set-status", SAMPLE_ID, "--tenant", "", "lost"],
        ["interrupt", SAMPLE_ID],
        ["delete", SAMPLE_ID, "--no-input"],
        ["rename", SAMPLE_ID],
        [],
    ],
    ids=" ".join,
    shared=True,
)
def test_wrong_usage_says_so(arguments: list[str], sample: CommittedDatabase) -> None:
    ended = sessions(sample, *arguments)
    assert ended.code in (1, 2)
    assert (ended.out.count("\n"), bool(ended.err)) == (0, True)
    # call_command gives errors of the parser the exit code 1; the command line gives them 2.
    assert ended.code == 2 or "rror" in ended.err or "expected" in ended.err or "invalid" in ended.err


def test_an_id_of_several_tenants_needs_the_tenant(sample: CommittedDatabase) -> None:
    ended = sessions(sample, "show", SAMPLE_ID)
    assert ended.code == 2
    assert ended.err == f"2 tenants have a session {SAMPLE_ID}: '', '{sample.tenant}'. Give --tenant."
    assert sessions(sample, "show", SAMPLE_ID, "--tenant", sample.tenant).code == 0


def test_an_id_of_one_tenant_is_found_without_it(empty_db: CommittedDatabase) -> None:
    write_sample(empty_db.alias, tenant=empty_db.tenant)
    for tenant in ("a", "z" * 50):
        DatabaseStateStore(empty_db.alias, tenant=tenant).create_session("other", agent_type="a")
    with CaptureQueriesContext(connections[empty_db.alias]) as queries:
        assert sessions(empty_db, "tree", SAMPLE_ID, "--format", "json").data["tenant"] == empty_db.tenant
    assert len(queries) == 4


def test_an_unknown_session_is_a_problem(empty_db: CommittedDatabase) -> None:
    for arguments in (["show", "x"], ["tree", "x"], ["interrupt", "x"], ["delete", "x", "--no-input"]):
        for tenant in ([], ["--tenant", "t"]):
            ended = sessions(empty_db, *arguments, *tenant)
            assert (ended.out, ended.code) == ("", 1)
            assert "no session with the id 'x'" in ended.err


# --- show and tree


def test_a_page_shows_all_that_a_session_has(sample: CommittedDatabase) -> None:
    text = sessions(sample, "show", SAMPLE_ID, "--tenant", sample.tenant, "--messages", "2").out
    headings = [line for line in text.splitlines() if line.isupper() and line[0] != " "]
    assert headings == [
        "CUSTOM STATE",
        "PENDING TOOL CALLS",
        "RUNS, NEWEST FIRST",
        "SUB-SESSIONS",
        "CHECKPOINTS, NEWEST 3 OF 3",
        "USAGE",
        "MESSAGES, NEWEST 2 OF 5",
    ]
    for expected in (
        "title       A trip to São Paulo",
        "counts      3 steps, 5 messages, 0 resumes",
        '"step": 3',
        "$0.0125",
        "trip-1-visa",
        "5  assistant",
    ):
        assert expected in text
    assert "MESSAGES" not in sessions(sample, "show", SAMPLE_ID, "--tenant", sample.tenant).out


def test_the_json_of_a_page_has_its_keys(sample: CommittedDatabase) -> None:
    arguments = ["show", SAMPLE_ID, "--tenant", "", "--format", "json"]
    data = read_by_a_program(sessions(sample, *arguments, "--messages", "2", "--limit", "1").out)
    assert data.keys() == {
        "tenant",
        "session_id",
        "stuck",
        "state",
        "interrupt",
        "runs",
        "sub_sessions",
        "waiting_posts",
        "checkpoints",
        "usage",
        "budgets",
        "decisions",
        "open_effects",
        "messages",
        "conversations",
        "unread_rows",
        "problems",
    }
    assert data["state"]["custom_state"] == {"step": 3, "flights": ["JL 5"] * 1}
    assert [each["sequence"] for each in data["messages"]] == [4, 5]
    assert data["messages"][1]["message"]["role"] == "assistant"
    assert (len(data["checkpoints"]["items"]), data["checkpoints"]["total"]) == (1, 3)
    assert data["problems"] == []
    assert sessions(sample, *arguments).data["messages"] is None


def test_a_damaged_part_does_not_hide_the_others(sample: CommittedDatabase) -> None:
    alias = sample.alias
    Message.objects.using(alias).filter(session__tenant="", sequence=2).update(payload="{")
    Checkpoint.objects.using(alias).filter(session__tenant="").update(payload="{", base=None)
    ended = sessions(sample, "show", SAMPLE_ID, "--tenant", "", "--messages", "9")
    assert ended.code == 1
    assert "CHECKPOINTS, NEWEST 3 OF 3" in ended.out
    assert "state: " in ended.err
    assert "messages: " in ended.err
    data = sessions(sample, "show", SAMPLE_ID, "--tenant", "", "--format", "json").data
    assert data["state"] is None
    assert len(data["problems"]) == 1


def test_a_tree_shows_who_started_whom(sample: CommittedDatabase) -> None:
    store = store_of(sample)
    child = f"{SAMPLE_ID}-hotels"
    store.create_session("grandchild", agent_type="rooms", parent_session_id=child)
    # Two sessions may refer to each other.
    store.add_sub_session_refs(child, [{"sub_session_id": SAMPLE_ID, "agent_type": "travel"}])
    store.add_sub_session_refs(child, [{"sub_session_id": "gone", "agent_type": "lost"}])
    arguments = ["tree", SAMPLE_ID, "--tenant", sample.tenant]
    lines = sessions(sample, *arguments).lines
    assert [line.split("  ")[0] if line[0] != "│" else line[3:].split("  ")[0] for line in lines] == [
        "trip-1",
        "├─ trip-1-hotels",
        "├─ trip-1",
        "├─ gone",
        "└─ grandchild",
        "└─ trip-1-visa",
    ]
    assert "(see above)" in lines[2]
    assert lines[3].endswith("missing")
    assert lines[5].endswith("remote")
    nodes = read_by_a_program(sessions(sample, *arguments, "--format", "json").out)["nodes"]
    assert [(node["session_id"], node["depth"], node["above"]) for node in nodes] == [
        ("trip-1", 0, None),
        ("trip-1-hotels", 1, "trip-1"),
        ("trip-1", 2, "trip-1-hotels"),
        ("gone", 2, "trip-1-hotels"),
        ("grandchild", 2, "trip-1-hotels"),
        ("trip-1-visa", 1, "trip-1"),
    ]
    assert nodes[0].keys() == {"session_id", "depth", "above", "is_repeated", "session", "ref"}
    below = sessions(sample, "tree", "grandchild")
    assert len(below.lines) == 1
    assert sessions(sample, "tree", "grandchild", "--from-root").lines[0].startswith("trip-1 ")


@pytest.mark.thorough
def test_a_deep_tree_is_no_problem(empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    store = store_of(empty_db)
    parent = None
    for depth in range(120):
        parent = store.create_session(f"level-{depth}", agent_type="a", parent_session_id=parent).session_id
    ended = sessions(empty_db, "tree", "level-0")
    assert len(ended.lines) == 120
    assert max(map(width_of, ended.lines)) <= 80


# --- Other names of filters --------------------------------------------------------------------------


def test_every_argument_of_list_sessions_is_an_option_of_its_name() -> None:
    options = set(PARSERS["helix_sessions list"]._option_string_actions)
    assert {f"--{name.replace('_', '-')}" for name in SESSION_FILTERS} <= options


OTHER_NAMES: Final = {
    "helix_sessions list --user-id user-1": "helix_sessions list --user user-1",
    f"helix_sessions list --parent-session-id {SAMPLE_ID}": f"helix_sessions list --parent {SAMPLE_ID}",
    f"helix_sessions list --root-session-id {SAMPLE_ID}": f"helix_sessions list --root {SAMPLE_ID}",
    "helix_sessions list --workspace-id w": "helix_sessions list --workspace w",
    "helix_sessions list --tags demo --tag x": "helix_sessions list --tag demo --tag x",
    "helix_sessions list --tags demo --tags demo": "helix_sessions list --tag demo",
    "helix_sessions list --par trip-1": "helix_sessions list --parent trip-1",
    "helix_sessions list --parent-s trip-1": "helix_sessions list --parent trip-1",
    "helix_sessions list --use=user-1": "helix_sessions list --user user-1",
    "helix_usage --user-id user-1 --by session": "helix_usage --user user-1 --by session",
    "helix_usage --use user-1 --by session": "helix_usage --user user-1 --by session",
}


def test_a_filter_has_two_names(sample: CommittedDatabase) -> None:
    with Cells() as cells:
        for other, usual in OTHER_NAMES.items():
            with cells.check(other):
                found, expected = (
                    run(sample.alias, *words.split(), "--format", "json") for words in (other, usual)
                )
                assert (found.code, found.out) == (0, expected.out)


def test_two_names_of_one_value_are_no_two_filters(sample: CommittedDatabase) -> None:
    for words in (f"--parent-session-id {SAMPLE_ID} --roots", "--ro"):
        assert sessions(sample, "list", *words.split()).code == 2


@pytest.mark.parametrize("title", ["helix_sessions list", "helix_usage"])
def test_the_help_lists_one_name_of_a_filter(title: str) -> None:
    text = PARSERS[title].format_help()
    assert "--user " in text
    assert not re.findall(r"--(?:user|workspace|parent-session|root-session)-id|--tags", text)
