-- The tables of the limit: the same facts in the plainest form, jsonb, no foreign keys.
CREATE TABLE ref_session (
    id text PRIMARY KEY, agent_type text NOT NULL, status text NOT NULL, version bigint NOT NULL,
    message_count bigint NOT NULL, updated_at timestamptz NOT NULL, state jsonb NOT NULL
);
CREATE INDEX ref_session_list ON ref_session (agent_type, status, updated_at DESC, id DESC);
CREATE TABLE ref_message (
    session_id text, seq bigint, role text NOT NULL, content jsonb NOT NULL, created_at timestamptz NOT NULL,
    PRIMARY KEY (session_id, seq)
);
CREATE TABLE ref_checkpoint (
    session_id text, version bigint, state jsonb NOT NULL, message_count bigint NOT NULL, created_at timestamptz NOT NULL,
    PRIMARY KEY (session_id, version)
);
CREATE TABLE ref_staged (
    session_id text, step_id text, ord bigint, payload jsonb NOT NULL, PRIMARY KEY (session_id, step_id, ord)
);
CREATE TABLE ref_lock (name text PRIMARY KEY, token bigint NOT NULL, expires_at timestamptz);
CREATE TABLE ref_usage (
    id text PRIMARY KEY, session_id text NOT NULL, kind text NOT NULL, name text, prompt bigint, completion bigint,
    total bigint, is_failure boolean, duration_ms bigint, cost bigint, at timestamptz NOT NULL
);
CREATE INDEX ref_usage_session ON ref_usage (session_id, at);
CREATE TABLE ref_tree (id text PRIMARY KEY, parent_id text);
CREATE INDEX ref_tree_parent ON ref_tree (parent_id);
CREATE TABLE ref_stream (id text PRIMARY KEY, last_seq bigint NOT NULL, updated_at timestamptz NOT NULL);
CREATE TABLE ref_chunk (stream_id text, seq bigint, payload jsonb NOT NULL, PRIMARY KEY (stream_id, seq));
CREATE TABLE ref_thread (id text PRIMARY KEY, last_seq bigint NOT NULL);
CREATE TABLE ref_snapshot (
    thread_id text, seq bigint, id text NOT NULL, size bigint NOT NULL, payload jsonb NOT NULL,
    created_at timestamptz NOT NULL, PRIMARY KEY (thread_id, seq)
);
CREATE TABLE ref_head (
    id text PRIMARY KEY, agent_type text NOT NULL, status text NOT NULL, version bigint NOT NULL,
    message_count bigint NOT NULL, title text, user_id text, created_at timestamptz NOT NULL, updated_at timestamptz NOT NULL
);
CREATE INDEX ref_head_list ON ref_head (agent_type, status, updated_at DESC, id DESC);
