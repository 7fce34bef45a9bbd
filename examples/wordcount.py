"""Counts the words of standard input: sandvmm run -i examples/wordcount.py 5 < book.txt"""

import collections
import re
import sys

how_many = int(sys.argv[1]) if len(sys.argv) > 1 else 10
counts = collections.Counter()
for line in sys.stdin:
    counts.update(re.findall(r"\w+", line.lower()))
for word, count in counts.most_common(how_many):
    print(f"{count:8} {word}")
