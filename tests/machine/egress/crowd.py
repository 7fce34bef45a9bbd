"""More of each thing than there is room for: names and ports, connections at once, and what nobody named."""
import socket, time


def refused(address):
    with socket.socket() as stream:
        try:
            stream.connect(address)
        except ConnectionRefusedError:
            return 1
    return 0


server = socket.gethostbyname("allowed.example"), 5432
kept = []
for _ in range(300):
    try:
        stream = socket.create_connection(server, 60)
        if stream.recv(6) == b"ready\n":
            kept.append(stream)
    except ConnectionResetError:
        pass
print(len(kept))
for stream in kept:
    stream.close()

# Each of these names has 32 ports.
names = [socket.gethostbyname(f"h{number}.crowd.example") for number in range(40)]
print(refused((names[39], 9131)))

denied = socket.gethostbyname("denied.example")
print(sum(refused((denied, port)) for port in range(1000, 1500)))
# The last of them are on their way.
time.sleep(2)
