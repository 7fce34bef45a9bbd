"""What an unmodified program sees of a network in which allowed.example and others were named."""
import errno, os, socket, ssl, sys, time, urllib.request

context = ssl.create_default_context(cafile="server.pem")


def get(url):
    with urllib.request.urlopen(url, timeout=60, context=context) as answer:
        return answer.read().decode().strip()


print(get("http://allowed.example/"))
print(get("https://allowed.example/"))
print(get("http://ALLOWED.example./").lower())
print(get("https://www.allowed.example/"))
print(get("https://six.example/"))
print(get("http://a.b.allowed.example/"))
print(get("http://" + "bücher.example".encode("idna").decode() + "/"))

# Both families, by getaddrinfo as by the file that tells where to ask.
families = {found[0] for found in socket.getaddrinfo("allowed.example", 443, type=socket.SOCK_STREAM)}
print(families == {socket.AF_INET, socket.AF_INET6}, open("/etc/resolv.conf").read().startswith("nameserver 127.0.0.1"))

# A server that speaks first, over IPv6 too.
for family in (socket.AF_INET, socket.AF_INET6):
    address = socket.getaddrinfo("allowed.example", 5432, family, socket.SOCK_STREAM)[0][4]
    with socket.socket(family, socket.SOCK_STREAM) as stream:
        stream.settimeout(60)
        stream.connect(address)
        reader = stream.makefile("rb")
        print(reader.readline())
        stream.sendall(b"hello\n")
        stream.shutdown(socket.SHUT_WR)
        print(reader.read())


def refused(connect):
    began = time.monotonic()
    try:
        connect()
    except OSError as error:
        return errno.errorcode.get(error.errno), time.monotonic() - began < 5
    return "connected", False


def quic():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(30)
        datagrams.connect((socket.gethostbyname("allowed.example"), 443))
        datagrams.send(b"hello")
        datagrams.recv(1)


print(refused(lambda: socket.create_connection(("denied.example", 443), 60)))
print(refused(lambda: socket.create_connection(("allowed.example", 8443), 60)))
print(refused(lambda: socket.create_connection(("93.184.216.34", 443), 60)))
print(refused(quic))
