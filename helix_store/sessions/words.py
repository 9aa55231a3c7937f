"""The words of a session that a search reads: those of its title, its user, its tags and its id."""

from __future__ import annotations

import json
from typing import Any, Final

from django.db.models import BooleanField, Func

from helix_store.conf import constraint_name
from helix_store.engine.statement import Statement

INDEX_NAME: Final = constraint_name("session_words_idx")

SEARCHED_TEXT: Final = (
    "((COALESCE({title}, '') || ' ' || {session_id} || ' ' || COALESCE({user_id}, '') || ' ' || {tags}::text)"
    ' COLLATE pg_catalog."default")'
)
"""The indexed text. Ids have the collation C, in which only ASCII letters have an upper and a lower case."""

HAS_INDEX: Final = Statement(
    "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_index "
    f"WHERE indexrelid = to_regclass('{INDEX_NAME}') AND indisvalid)"
)


class Contains(Func):
    """The condition that the title, user, tags or id of a session contain a word, ignoring case."""

    columns = ("title", "session_id", "user_id", "tags")

    def __init__(self, word: str) -> None:
        super().__init__(*self.columns, output_field=BooleanField())
        self.word = word

    def _columns(self, compiler: Any) -> dict[str, str]:
        compiled = (compiler.compile(source)[0] for source in self.source_expressions)
        return dict(zip(self.columns, compiled, strict=True))

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        text = SEARCHED_TEXT.format(**self._columns(compiler))
        return f"({text} ILIKE %s)", (_pattern(self.word),)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        columns = self._columns(compiler)
        conditions = " OR ".join(f"{columns[name]} LIKE %s ESCAPE '\\'" for name in self.columns)
        written_in_json = json.dumps(self.word)[1:-1]
        pattern = _pattern(self.word)
        return f"({conditions})", (pattern, pattern, pattern, _pattern(written_in_json))


def _pattern(word: str) -> str:
    for special in "\\%_":
        word = word.replace(special, f"\\{special}")
    return f"%{word}%"
