"""As many connections as the first argument says: closed at once, half-open, and never reading; then one that is good."""
import socket, sys, time

counts = {"refused": 0, "kept": 0, "closed": 0}
kept = []
address = socket.gethostbyname("allowed.example"), 80
for number in range(int(sys.argv[1])):
    stream = socket.socket()
    stream.settimeout(10)
    try:
        stream.connect(address)
    except OSError:
        counts["refused"] += 1
        stream.close()
        continue
    kind = number % 4
    try:
        if kind == 1:
            stream.sendall(b"GET / HTTP/1.1\r\nHost: allo")
        elif kind == 2:
            stream.sendall(b"GET /big HTTP/1.1\r\nHost: allowed.example\r\n\r\n" * 50)
        if kind and len(kept) < 600:
            kept.append(stream)
            counts["kept"] += 1
        else:
            stream.close()
            counts["closed"] += 1
    except OSError:
        counts["refused"] += 1
for stream in kept:
    stream.close()
print(sum(counts.values()))
deadline = time.monotonic() + 60
while True:
    try:
        with socket.create_connection(("allowed.example", 80), 10) as stream:
            stream.sendall(b"GET /after HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
            assert b"200" in stream.recv(4096)
        break
    except (OSError, AssertionError):
        assert time.monotonic() < deadline, "the way out did not come back"
        time.sleep(0.5)
print("good")
