"""The servers of the test network: names, HTTP, HTTPS, Redis, and two protocols of their own. What they receive is in the logs.

Over HTTP there are files, /files/, and Git repositories, /git/; below /private/ the same for who knows the secret.
"""
import base64, hashlib, http.server, json, mimetypes, os, socket, ssl, struct, subprocess, sys, threading, time

folder = sys.argv[1]
log = open(os.path.join(folder, "received"), "a", buffering=1)
seen = open(os.path.join(folder, "seen"), "a", buffering=1)
asked = open(os.path.join(folder, "asked"), "a", buffering=1)

# More than anything on the way may hold.
BIG = bytes(4 << 20)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status=200, fields=(), body=b""):
        self.send_response(status)
        for name, value in fields:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def show(self, body=""):
        """Writes down all of a request, and sends its credentials back: in a field, and in a body."""
        fields = {name.lower(): value for name, value in self.headers.items()}
        seen.write(json.dumps({"path": self.path, "fields": fields, "body": body}) + "\n")
        token = fields.get("authorization", "")
        self.answer(fields=[("X-Back", token)], body=f"you are {token}\n".encode())

    def is_served(self, body=b""):
        """Serves files and repositories, if it is for one of them."""
        if self.path.startswith("/private/"):
            with open(os.path.join(folder, "token")) as token:
                credentials = base64.b64encode(f"me:{token.read().strip()}".encode()).decode()
            if self.headers["Authorization"] != f"Basic {credentials}":
                self.answer(401, [("WWW-Authenticate", 'Basic realm="test"')])
                return True
            self.path = self.path.removeprefix("/private")
        if self.path.startswith("/files/"):
            self.file()
        elif self.path.startswith("/git/"):
            self.git(body)
        else:
            return False
        return True

    def file(self):
        path = os.path.join(folder, self.path[1:])
        path += "index.html" if path.endswith("/") else ""
        if not os.path.isfile(path):
            return self.answer(404)
        with open(path, "rb") as file:
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            self.answer(fields=[("Content-Type", kind)], body=file.read())

    def git(self, body):
        """git-http-backend(1), as RFC 3875 has it."""
        path, _, query = self.path.removeprefix("/git").partition("?")
        variables = {"GIT_PROJECT_ROOT": os.path.join(folder, "git"), "GIT_HTTP_EXPORT_ALL": "1", "REQUEST_METHOD": self.command}
        variables |= {"PATH_INFO": path, "QUERY_STRING": query, "CONTENT_TYPE": self.headers["Content-Type"] or ""}
        variables |= {"CONTENT_LENGTH": str(len(body)), "GIT_PROTOCOL": self.headers["Git-Protocol"] or ""}
        variables |= {"HTTP_CONTENT_ENCODING": self.headers["Content-Encoding"] or ""}
        done = subprocess.run(["git", "http-backend"], input=body, stdout=subprocess.PIPE, env=os.environ | variables, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = [value for name, value in fields if name == "Status"]
        self.answer(int(status[0][:3]) if status else 200, [field for field in fields if field[0] != "Status"], body)

    def do_GET(self):
        if self.path.startswith("/show"):
            return self.show()
        if self.is_served():
            return
        log.write(f"{self.headers['Host']} {self.path}\n")
        if self.path == "/wait":
            while not os.path.exists(os.path.join(folder, "scanned")):
                time.sleep(0.1)
        if self.path == "/big":
            self.answer(body=BIG)
        elif self.path == "/redirect":
            self.answer(302, [("Location", "http://169.254.169.254/latest/meta-data/")])
        else:
            self.answer(body=f"hello from {self.headers['Host']}\n".encode())

    def do_POST(self):
        if self.path.startswith("/show"):
            return self.show(self.read_body().decode())
        if self.path.startswith(("/private/", "/git/")) and self.is_served(self.read_body()):
            return
        if self.headers["Transfer-Encoding"]:
            return self.answer(body=hashlib.sha256(self.read_body()).hexdigest().encode())
        length = int(self.headers["Content-Length"])
        digest = hashlib.sha256()
        while length:
            piece = self.rfile.read(min(length, 1 << 20))
            digest.update(piece)
            length -= len(piece)
        self.answer(body=digest.hexdigest().encode())

    def read_body(self):
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    request_queue_size = 512

    def server_bind(self):
        # Both families on one socket.
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve(port, context=None):
    server = Server(("", port), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def serve_raw(port, serve_one):
    listener = socket.create_server(("", port), backlog=512)

    def loop():
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=serve_one, args=(stream,), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


def greet(stream):
    """Speaks first, then echoes in capitals."""
    with stream:
        stream.sendall(b"ready\n")
        while piece := stream.recv(4096):
            stream.sendall(piece.upper())


redis_values = {}


def redis(stream):
    """What redis-cli needs of a server: PING, SET, GET (https://redis.io/docs/reference/protocol-spec)."""
    with stream, stream.makefile("rwb") as words:
        while line := words.readline():
            command = []
            for _ in range(int(line[1:])):
                length = int(words.readline()[1:])
                command.append(words.read(length + 2)[:-2])
            match command:
                case [b"PING"]:
                    answer = b"+PONG"
                case [b"SET", key, value]:
                    redis_values[key] = value
                    answer = b"+OK"
                case [b"GET", key]:
                    answer = b"$%d\r\n%s" % (len(redis_values[key]), redis_values[key])
                case _:
                    answer = b"-ERR"
            words.write(answer + b"\r\n")
            words.flush()


def postgresql(stream):
    """What psql needs of a server: no encryption, any user, and queries, each of which is answered with a row that is its own text
    (https://www.postgresql.org/docs/15/protocol.html)."""

    def message(kind, body):
        return kind + (len(body) + 4).to_bytes(4, "big") + body

    with stream, stream.makefile("rwb") as words:

        def body():
            return words.read(int.from_bytes(words.read(4), "big") - 4)

        # Each request for encryption is 1234 and a number above 5678; a start has the version, 3.
        while body().startswith(b"\x04\xd2"):
            words.write(b"N")
            words.flush()
        ready = message(b"Z", b"I")
        words.write(message(b"R", bytes(4)) + message(b"S", b"server_version\x0015.0\x00") + ready)
        words.flush()
        while words.read(1) == b"Q":
            text = body()[:-1]
            column = b"text\x00" + bytes(6) + (25).to_bytes(4, "big") + b"\xff\xff" + b"\xff" * 4 + bytes(2)
            words.write(message(b"T", b"\x00\x01" + column))
            words.write(message(b"D", b"\x00\x01" + len(text).to_bytes(4, "big") + text))
            words.write(message(b"C", b"SELECT 1\x00") + ready)
            words.flush()


def names():
    """A name server (RFC 1035). rebind.example is a public address the first time and a private one from then on; there is no other
    name. What is asked is in the log."""
    sockets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sockets.bind(("127.0.0.1", 53))

    def loop():
        addresses = ["93.184.216.34", "10.7.7.7"]
        while True:
            question, peer = sockets.recvfrom(4096)
            end, labels = 12, []
            while length := question[end]:
                labels.append(question[end + 1 : end + 1 + length].decode())
                end += 1 + length
            name, kind = ".".join(labels), struct.unpack(">H", question[end + 1 : end + 3])[0]
            asked.write(name + "\n")
            is_known = name == "rebind.example"
            records = b""
            if is_known and kind == 1:
                records = struct.pack(">HHHLH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(addresses[0])
                del addresses[:-1]
            counts = struct.pack(">5H", 0x8180 if is_known else 0x8183, 1, 1 if records else 0, 0, 0)
            sockets.sendto(question[:2] + counts + question[12 : end + 5] + records, peer)

    threading.Thread(target=loop, daemon=True).start()


def bulk(stream):
    """Takes all that comes, then sends as many bytes as its first line says, and the hash of what came."""
    with stream:
        reader = stream.makefile("rb")
        taken, sent = map(int, reader.readline().split())
        digest = hashlib.sha256()
        while taken:
            piece = reader.read(min(taken, 1 << 20))
            digest.update(piece)
            taken -= len(piece)
        stream.sendall(digest.hexdigest().encode() + b"\n")
        piece = bytes(range(256)) * 256
        digest = hashlib.sha256()
        while sent:
            part = piece[:sent]
            stream.sendall(part)
            digest.update(part)
            sent -= len(part)
        stream.sendall(digest.hexdigest().encode() + b"\n")


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(os.path.join(folder, "server.pem"), os.path.join(folder, "server.key"))
known = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
known.load_cert_chain(os.path.join(folder, "api.pem"), os.path.join(folder, "api.key"))


def choose(connection, name, _):
    if name == "api.example":
        connection.context = known


context.sni_callback = choose
names()
serve(80)
serve(443, context)
serve(8080)
serve_raw(5432, greet)
serve_raw(5433, postgresql)
serve_raw(6379, redis)
serve_raw(9000, bulk)
open(os.path.join(folder, "up"), "w").close()
threading.Event().wait()
