"""What requests and httpx see where allowed.example was named, and a secret for api.example."""
import os, time
import httpx, requests

token = {"Authorization": "Bearer " + os.environ["TOKEN"]}
print("requests", requests.get("https://api.example/show", headers=token, timeout=60).status_code)
with httpx.Client(http2=True, timeout=60) as client:
    answer = client.get("https://api.example/show", headers=token)
    print("httpx", answer.status_code, answer.http_version)
    answer = client.get("https://api.example:8443/show", headers=token)
    print("httpx", answer.status_code, answer.http_version, answer.headers["X-Back"], answer.text.strip())

with requests.Session() as session:
    options = {"verify": "/tmp/server.pem", "timeout": 60}
    # Both on one connection.
    print(session.get("https://allowed.example/", **options).text.strip())
    posted = session.post("https://allowed.example/", data=iter([b"a" * 100_000, b"b"]), **options)
    print(len(posted.text), posted.status_code)


def refused(get):
    began = time.monotonic()
    try:
        get()
    except (requests.ConnectionError, httpx.ConnectError) as error:
        return type(error).__name__, "refused" in str(error), time.monotonic() - began < 5
    return "answered"


with httpx.Client(http2=True, verify="/tmp/server.pem", timeout=60) as client:
    answer = client.get("https://allowed.example:8443/")
    print(answer.http_version, answer.text.strip())
    print(refused(lambda: client.get("https://denied.example/")))
print(refused(lambda: requests.get("http://allowed.example/redirect", timeout=60)))
