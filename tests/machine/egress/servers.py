"""The servers of the test network: HTTP, HTTPS, and two protocols of their own. What they receive is in the log."""
import hashlib, http.server, json, os, socket, ssl, sys, threading, time

folder = sys.argv[1]
log = open(os.path.join(folder, "received"), "a", buffering=1)
seen = open(os.path.join(folder, "seen"), "a", buffering=1)


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

    def do_GET(self):
        if self.path.startswith("/show"):
            return self.show()
        log.write(f"{self.headers['Host']} {self.path}\n")
        if self.path == "/wait":
            while not os.path.exists(os.path.join(folder, "scanned")):
                time.sleep(0.1)
        if self.path == "/redirect":
            self.answer(302, [("Location", "http://169.254.169.254/latest/meta-data/")])
        else:
            self.answer(body=f"hello from {self.headers['Host']}\n".encode())

    def do_POST(self):
        if self.path.startswith("/show"):
            return self.show(self.read_body().decode())
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
serve(80)
serve(443, context)
serve(8080)
serve_raw(5432, greet)
serve_raw(9000, bulk)
open(os.path.join(folder, "up"), "w").close()
threading.Event().wait()
