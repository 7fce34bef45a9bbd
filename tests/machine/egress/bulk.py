"""As many MiB as the first argument says, there and back, with the hashes of both."""
import hashlib, socket, sys

size = int(sys.argv[1]) << 20
piece = bytes(range(256)) * 1024
with socket.create_connection(("allowed.example", 9000), 60) as stream:
    stream.settimeout(None)
    stream.sendall(f"{size} {size}\n".encode())
    digest = hashlib.sha256()
    left = size
    while left:
        part = piece[:left]
        stream.sendall(part)
        digest.update(part)
        left -= len(part)
    reader = stream.makefile("rb")
    there = reader.readline().decode().strip() == digest.hexdigest()
    digest = hashlib.sha256()
    left = size
    while left:
        part = reader.read(min(left, 1 << 20))
        digest.update(part)
        left -= len(part)
    back = reader.readline().decode().strip() == digest.hexdigest()
print(there, back)
