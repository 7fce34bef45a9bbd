#!/bin/sh
# Digits of pi from whole numbers alone (Machin's formula): sandvmm run examples/pi.sh 50
digits="${1:-30}"
exec python3 - "$digits" <<'PYTHON'
import sys

digits = int(sys.argv[1])
unit = 10 ** (digits + 10)

def arctan_of_inverse(x):
    total = term = unit // x
    n, sign = 3, -1
    while term:
        term //= x * x
        total += sign * (term // n)
        n, sign = n + 2, -sign
    return total

pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) // 10 ** 10
print(f"3.{str(pi)[1:]}")
PYTHON
