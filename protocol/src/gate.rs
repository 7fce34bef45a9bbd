//! The words of the *gate*, the process in the guest through which connections leave and enter.
//!
//! The agent starts it when the host says [`crate::message::ToAgent::Gate`]. It dials [`crate::port::GATE_CONTROL`] on the
//! host once; the host sends [`Rules`] there, at once and after each change, and the gate [`FromGate`]. For each connection
//! of a program it dials [`crate::port::GATE`] and says [`Open`]; the host answers with [`CONNECTED`] and carries from then
//! on, or closes the stream. To reach a port in the guest the host dials [`crate::port::GATE`] there and says [`Inward`],
//! which is answered likewise.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Largest frame of this module but [`Rules`], in bytes.
pub const MAX_GATE_FRAME_BYTES: usize = 4 << 10;

/// Most connections of a gate at one time, in both directions together; one more is reset.
pub const MAX_GATE_CONNECTIONS: usize = 256;

/// Most sockets by which a gate listens: each address takes one for each of its ports, and each name one for each of its ports over
/// IPv4 and one over IPv6, from when it is first asked for. What finds no room is refused.
pub const MAX_GATE_LISTENERS: usize = 2048;

/// What is written in front of a connection's first byte.
pub const CONNECTED: u8 = 1;

/// What the gate says on its control stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FromGate {
    /// The rules hold: programs may run.
    Ready,
    /// There is no way out in this guest.
    Failed {
        /// A sentence for the user.
        message: String,
    },
    /// What a program has tried was refused in the guest.
    Refused(Refused),
}

/// An attempt that was refused in the guest, and how many have no word of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// What was tried.
    pub open: Open,
    /// Why it was refused.
    pub why: Refusal,
    /// Attempts that were refused as well, since the word before this one.
    pub others: u32,
}

/// Why an attempt was refused in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// No rule allows it.
    NotAllowed,
    /// It was a datagram: none leaves.
    Datagram,
    /// A rule allows it, but there are [`MAX_GATE_LISTENERS`] already.
    NoListener,
    /// A rule allows it, but a program of the guest listens on the port, on all addresses, and has got the connection.
    PortTaken,
    /// There are [`MAX_GATE_CONNECTIONS`] already, or the guest has no memory for one more.
    NoConnection,
}

/// A connection that a program wants to make; first frame of its stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Where to.
    pub target: Target,
    /// The port.
    pub port: u16,
    /// Which process it is, if that was found out.
    pub process: Option<Process>,
}

/// Where a connection is to go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// A host name, in lower case and without a dot at its end.
    Name(String),
    /// A literal address.
    Address(IpAddr),
}

/// A process of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its name (`/proc/PID/comm`).
    pub name: String,
}

/// A port of the guest's loopback that the host wants to reach; first frame of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inward {
    /// The port.
    pub port: u16,
}

/// What may leave, as far as the gate has to know it to refuse the rest at once. The host checks each connection itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Hosts.
    pub names: Vec<NameRule>,
    /// Literal addresses.
    pub addresses: Vec<AddressRule>,
    /// Ports of every host: the host decides on each connection.
    pub every: Vec<u16>,
    /// What programs have to trust, where the host opens TLS.
    pub trust: Option<Trust>,
}

/// Certificates that programs in the guest trust, in PEM. They are in place before [`FromGate::Ready`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// That of the sandbox's own authority.
    pub authority: String,
    /// Those that the host trusts, for an image that has none.
    pub host_roots: String,
}

/// Where programs in the guest find the authority's certificate alone.
pub const AUTHORITY_FILE: &str = "/run/sandvmm-trust/authority.pem";

/// Where they find it together with all others that they trust.
pub const TRUST_FILE: &str = "/run/sandvmm-trust/all.pem";

/// The variables by which programs are told of [`TRUST_FILE`], each with who reads it.
pub const TRUST_VARIABLES: [&str; 12] = [
    // OpenSSL and all that leave the choice to it, Go, Ruby, uv, httpx.
    "SSL_CERT_FILE",
    // Python's requests, and pip.
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    // curl, also of programs that are built on its library.
    "CURL_CA_BUNDLE",
    // git, cargo.
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    // The AWS tools and libraries.
    "AWS_CA_BUNDLE",
    // Nix's OpenSSL, gRPC, Deno, npm, Python's httplib2.
    "NIX_SSL_CERT_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "DENO_CERT",
    "NPM_CONFIG_CAFILE",
    "HTTPLIB2_CA_CERTS",
];

/// The variable by which Node is told of [`AUTHORITY_FILE`]: it has a list of its own, to which this is added.
pub const EXTRA_TRUST_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";

/// Hosts that are allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameRule {
    /// A host, or the domain that hosts are below.
    pub name: String,
    /// Whether it is the domain.
    pub below: bool,
    /// On these ports.
    pub ports: Vec<u16>,
}

/// Addresses that are allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressRule {
    /// The first.
    pub address: IpAddr,
    /// How many bits all of them share with it.
    pub prefix_bits: u8,
    /// On these ports.
    pub ports: Vec<u16>,
}
