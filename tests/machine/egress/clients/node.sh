# Beside what Node was told to trust, the test's own certificate.
cat "$NODE_EXTRA_CA_CERTS" /tmp/server.pem > /tmp/both.pem
NODE_EXTRA_CA_CERTS=/tmp/both.pem exec node /tmp/client.mjs
