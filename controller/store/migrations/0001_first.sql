-- Incidents: what is asked for in queries is a column, the rest is JSON (see store/base.py: Incident).
CREATE TABLE incident (
    id TEXT PRIMARY KEY,
    opened_at REAL NOT NULL,
    closed_at REAL,
    phase TEXT NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX incident_by_time ON incident (opened_at DESC);
CREATE INDEX incident_open ON incident (opened_at DESC) WHERE phase <> 'closed';

CREATE TABLE line (
    seq INTEGER PRIMARY KEY,
    incident TEXT NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
    at REAL NOT NULL,
    text TEXT NOT NULL
) STRICT;
CREATE INDEX line_by_incident ON line (incident, seq);

-- The ledger: an intent is written before its act and concluded after it, once. AUTOINCREMENT: no number comes twice.
CREATE TABLE act (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    incident TEXT NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    target TEXT NOT NULL,
    args BLOB NOT NULL,
    why TEXT NOT NULL,
    intent_at REAL NOT NULL,
    outcome TEXT CHECK (outcome IN ('ok', 'failed')),
    detail TEXT NOT NULL DEFAULT '',
    concluded_at REAL
) STRICT;
CREATE INDEX act_by_incident ON act (incident, seq);
CREATE INDEX act_by_time ON act (intent_at);
CREATE TRIGGER act_is_final BEFORE UPDATE ON act
WHEN old.outcome IS NOT NULL
    OR new.incident <> old.incident OR new.kind <> old.kind OR new.target <> old.target
    OR new.args <> old.args OR new.why <> old.why OR new.intent_at <> old.intent_at
BEGIN
    SELECT RAISE(ABORT, 'the ledger is not rewritten');
END;

CREATE TABLE evidence (
    seq INTEGER PRIMARY KEY,
    incident TEXT NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    kind TEXT NOT NULL,
    at REAL NOT NULL,
    payload BLOB NOT NULL
) STRICT;
CREATE INDEX evidence_by_incident ON evidence (incident, seq);

CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    incident TEXT NOT NULL,
    target TEXT NOT NULL,
    body BLOB NOT NULL,
    at REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'sent', 'dead')),
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL NOT NULL,
    ended_at REAL,
    error TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX outbox_due ON outbox (next_at) WHERE state = 'waiting';

CREATE TABLE node (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    counter INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT;
