#!/usr/bin/env python3
"""A function of the host: a row of an SQLite database, by its number.

    sandvmm run --host-function query=examples/query.py agent.py

The database is $QUERY_DATABASE of the host's environment. The guest gives a number and nothing else: it is a value of the
query, never a part of it, and the database is opened read-only.
"""

import json
import os
import sqlite3
import sys

arguments = json.load(sys.stdin)
number = arguments.get("id") if isinstance(arguments, dict) else None
if type(number) is not int:
    sys.exit("An id is needed, a whole number")
path = os.environ["QUERY_DATABASE"]
with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
    row = database.execute("SELECT id, name FROM rows WHERE id = ?", (number,)).fetchone()
if row is None:
    sys.exit(f"There is no row {number}")
print(json.dumps({"id": row[0], "name": row[1]}))
