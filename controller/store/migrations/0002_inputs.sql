-- What the verdict of an incident was given on: a bundle (docs/bundle.md) as .tar.zst, the newest one of each incident.
CREATE TABLE inputs (
    incident TEXT PRIMARY KEY REFERENCES incident (id) ON DELETE CASCADE,
    at REAL NOT NULL,
    payload BLOB NOT NULL
) STRICT;
