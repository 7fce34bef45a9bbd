"""A server of HTTP/2 alone, at port 8443 of all addresses: h2, with the certificate of the folder in the first argument."""
import os, socket, ssl, sys, threading

import h2.config, h2.connection, h2.events

folder = sys.argv[1]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(os.path.join(folder, "server.pem"), os.path.join(folder, "server.key"))
context.set_alpn_protocols(["h2"])


def serve(plain):
    with plain, context.wrap_socket(plain, server_side=True) as stream:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        stream.sendall(connection.data_to_send())
        while piece := stream.recv(65536):
            for event in connection.receive_data(piece):
                if isinstance(event, h2.events.RequestReceived):
                    authority = dict(event.headers)[b":authority"]
                    connection.send_headers(event.stream_id, [(":status", "200")])
                    connection.send_data(event.stream_id, b"HTTP/2 from " + authority + b"\n", end_stream=True)
            stream.sendall(connection.data_to_send())


listener = socket.create_server(("", 8443))
open(os.path.join(folder, "http2-up"), "w").close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
