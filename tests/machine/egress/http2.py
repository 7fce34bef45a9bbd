"""A server of HTTP/2 alone, at port 8443 of all addresses: h2, with the certificates of the folder in the first argument. Requests for
/show are written down there, and their credentials sent back: in a field, and in a body.
"""
import json, os, socket, ssl, sys, threading

import h2.config, h2.connection, h2.events

folder = sys.argv[1]
seen = open(os.path.join(folder, "seen"), "a", buffering=1)


def context_of(name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.path.join(folder, f"{name}.pem"), os.path.join(folder, f"{name}.key"))
    context.set_alpn_protocols(["h2"])
    return context


def choose(stream, name, _):
    if name == "api.example":
        stream.context = api


context, api = context_of("server"), context_of("api")
context.sni_callback = choose


def answer(fields, body):
    """Fields and body of the answer to a request."""
    path = fields[":path"]
    if not path.startswith("/show"):
        return [], f"HTTP/2 from {fields[':authority']}\n"
    seen.write(json.dumps({"version": "HTTP/2", "path": path, "fields": fields, "body": body.decode()}) + "\n")
    token = fields.get("authorization", "")
    return [("x-back", token)], f"you are {token}\n"


def serve(plain):
    with plain, context.wrap_socket(plain, server_side=True) as stream:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        stream.sendall(connection.data_to_send())
        requests = {}
        while piece := stream.recv(65536):
            for event in connection.receive_data(piece):
                if isinstance(event, h2.events.RequestReceived):
                    requests[event.stream_id] = dict(event.headers), bytearray()
                elif isinstance(event, h2.events.DataReceived):
                    requests[event.stream_id][1].extend(event.data)
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    more, body = answer(*requests.pop(event.stream_id))
                    connection.send_headers(event.stream_id, [(":status", "200"), *more])
                    connection.send_data(event.stream_id, body.encode(), end_stream=True)
            stream.sendall(connection.data_to_send())


listener = socket.create_server(("", 8443))
open(os.path.join(folder, "http2-up"), "w").close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
