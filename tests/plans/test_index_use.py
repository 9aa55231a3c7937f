"""Every index serves a call: one that serves none only costs writes."""

from __future__ import annotations

from typing import Any, Final

import pytest
from django.apps import apps
from django.db.models import UniqueConstraint

from helix_store.models import Session
from tests.cells import for_each
from tests.plans.calls import ANALYSED, POSTGRES, SQLITE
from tests.plans.explained import plans_of
from tests.plans.rows import World
from tests.plans.test_index_proofs import CALLS

SERVED: Final = {
    "helix_session_id_uniq": "session_exists",
    "helix_session_updated_idx": "list_sessions() by updated_at",
    "helix_session_created_idx": "list_sessions() by created_at",
    "helix_session_type_idx": "list_sessions(agent type, status) by updated_at",
    "helix_session_status_idx": "list_sessions(status) by updated_at",
    "helix_session_user_idx": "list_sessions(user) by updated_at",
    "helix_session_work_idx": "list_sessions(workspace) by updated_at",
    "helix_session_parent_idx": "list_sessions(children) by updated_at",
    "helix_session_root_idx": "list_sessions(tree) by updated_at",
    "helix_session_agent_idx": "graph list_sessions",
    "helix_session_tags_idx": "list_sessions(tag) by updated_at",
    "helix_session_meta_idx": "list_sessions(metadata) by updated_at",
    "helix_session_stream_idx": "delete_session",
    "helix_session_pending_idx": "find_expired_pending",
    "helix_session_waiting_idx": "admin list, waiting",
    "helix_session_expiry_idx": "cleanup, dry",
    "helix_session_post_idx": "find_due_posts",
    "helix_session_stopped_idx": "find_stuck, crashed",
    "helix_session_waits_idx": "find_stuck, waiting",
    "helix_run_running_idx": "counts of metrics",
    "helix_effect_id_uniq": "an effect",
    "helix_decision_version_uniq": "an effect",
    "helix_effect_open_idx": "find_stuck, effect_unknown",
    "helix_effect_seq_uniq": "find_stuck, effect_unknown",
    "helix_session_expired_idx": "cleanup with deletion",
    "helix_checkpoint_ver_uniq": "list_checkpoints",
    "helix_checkpoint_id_uniq": "get_checkpoint",
    "helix_checkpoint_graph_idx": "graph get_checkpoint",
    "helix_checkpoint_order_idx": "graph list_checkpoints",
    "helix_checkpoint_state_uniq": "a step",
    "helix_message_seq_uniq": "get_messages, first page",
    "helix_operation_id_uniq": "a step as an operation",
    "helix_post_seq_uniq": "list_posts of all states",
    "helix_post_key_uniq": "post_message",
    "helix_post_waiting_idx": "receive_posts",
    "helix_post_author_idx": "posts of a user",
    "helix_run_id_uniq": "update_run",
    "helix_run_turn_uniq": "list_runs",
    "helix_run_running_uniq": "get_current_run",
    "helix_store_interrupt_request_session_id_key": "check_interrupt",
    "helix_staged_call_uniq": "get_staged_changes",
    "helix_sub_ref_uniq": "get_sub_session_refs",
    "helix_sub_ref_owner_idx": "links into sessions",
    "helix_lock_name_uniq": "is_locked",
    "helix_usage_entry_uniq": "record_entry",
    "helix_usage_session_idx": "get_entries of a kind",
    "helix_usage_kept_idx": "usage delete",
    "helix_usage_time_idx": "query_usage by dates",
    "helix_usage_user_idx": "query_usage by user",
    "helix_usage_model_idx": "query_usage by a model that nobody used",
    "helix_usage_agent_idx": "query_usage by an agent type that spent nothing",
    "helix_usage_sub_idx": "usage that names sub-sessions",
    "helix_usage_tree_idx": "set_budget of a tree",
    "helix_budget_name_uniq": "get_budget",
    "helix_budget_scope_idx": "check of budgets",
    "helix_budget_counter_uniq": "budget status",
    "helix_tombstone_digest_uniq": "tombstones of sessions",
    "helix_tombstone_erased_idx": "sweep of tombstones",
    "helix_stream_id_uniq": "get_info",
    "helix_stream_active_idx": "prune",
    "helix_stream_ended_idx": "prune",
    "helix_stream_keep_idx": "prune",
    "helix_chunk_seq_uniq": "read_after",
    "helix_item_key_uniq": "items get",
    "helix_item_lane_idx": "items tail",
}
"""By index, a call that needs it."""

OF_DOCUMENTS: Final = {
    "helix_session_tags_idx": (Session._meta.db_table, ("tags",)),
    "helix_session_meta_idx": (Session._meta.db_table, ("metadata",)),
}
"""On PostgreSQL alone, and declared by a migration, not by a model."""

NOT_ON_SQLITE: Final = {
    "helix_session_waiting_idx": "with statistics, it chooses the other index of the sessions that wait",
    **dict.fromkeys(OF_DOCUMENTS, "SQLite has no indexes of documents"),
    "helix_checkpoint_state_uniq": "a rule first of all; only the fast step of PostgreSQL deletes by it",
    "helix_usage_entry_uniq": "a rule first of all; SQLite does not name the index that ON CONFLICT asks",
}


def declared() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Table and columns of every index but primary keys, by its name on PostgreSQL."""
    found: dict[str, tuple[str, tuple[str, ...]]] = dict(OF_DOCUMENTS)
    for model in apps.get_app_config("helix_store").get_models():
        meta = model._meta
        if not meta.managed:
            continue
        uniques = [each for each in meta.constraints if isinstance(each, UniqueConstraint)]
        named: list[tuple[str, tuple[str, ...]]] = [
            *((index.name, tuple(index.fields)) for index in meta.indexes),
            *((unique.name, tuple(unique.fields)) for unique in uniques),
            *(
                (f"{meta.db_table}_{field.column}_key", (field.name,))
                for field in meta.concrete_fields
                if field.unique and not field.primary_key
            ),
        ]
        for name, fields in named:
            columns = tuple(str(meta.get_field(each).column) for each in fields)  # type: ignore[union-attr]
            found[name] = (meta.db_table, columns)
    return found


def test_the_table_names_every_index() -> None:
    assert set(SERVED) == set(declared())


def test_no_index_is_in_the_database_alone(world: World) -> None:
    actual = {
        (model._meta.db_table, tuple(constraint["columns"]))
        for model in apps.get_app_config("helix_store").get_models()
        if model._meta.managed
        for constraint in _constraints(world, model._meta.db_table)
        if (constraint["index"] or constraint["unique"]) and not constraint["primary_key"]
    }
    expected = set(declared().values())
    assert actual == (expected if world.name == POSTGRES else expected - set(OF_DOCUMENTS.values()))


@for_each("index", SERVED)
def test_an_index_serves_a_call(world: World, index: str) -> None:
    if world.name == SQLITE:
        pytest.skip("without statistics SQLite takes what it knows least of; the other two worlds decide")
    (call,) = [each for each in CALLS if each.name == SERVED[index]]
    plans = plans_of(world.database, call.make(world), undone=not call.commits)
    used = {name for plan in plans for name in plan.indexes}
    if world.name == ANALYSED:
        used |= _names_of_unnamed(world, used)
    is_expected = world.name != ANALYSED or index not in NOT_ON_SQLITE
    assert (index in used) == is_expected, used


def _names_of_unnamed(world: World, indexes: set[str]) -> set[str]:
    """SQLite numbers the indexes of constraints that stand in CREATE TABLE."""
    columns = set()
    with world.database.connection.cursor() as cursor:
        for index in indexes:
            if index.startswith("sqlite_autoindex_"):
                table = index.removeprefix("sqlite_autoindex_").rpartition("_")[0]
                cursor.execute(f"PRAGMA index_info({index})")
                columns.add((table, tuple(row[2] for row in cursor.fetchall())))
    return {name for name, place in declared().items() if place in columns}


def _constraints(world: World, table: str) -> list[Any]:
    connection = world.database.connection
    with connection.cursor() as cursor:
        return list(connection.introspection.get_constraints(cursor, table).values())
