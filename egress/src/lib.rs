//! Decides on and carries the connections that leave a sandbox: nothing leaves unless it was named.
//!
//! A guest's connection comes as a stream with a name and a port. In this order: the [`policy`] must allow name and port;
//! the client's first words must be for that name ([`tls`], [`http`], by a [`guard`]); the name is resolved and every
//! [`address`] that it stands for must be public or named by the operator ([`connect`]); the connection goes to an address
//! that was checked; bytes are carried with back-pressure ([`relay`]); what became of it is told ([`audit`]).
//!
//! The crate knows nothing of virtual machines: a stream is a socket.
#![forbid(unsafe_code)]

pub mod address;
pub mod audit;
pub mod connect;
pub mod gateway;
pub mod guard;
pub mod http;
pub mod interception;
pub mod name;
pub mod policy;
pub mod relay;
pub mod secret;
mod tally;
pub mod tls;
