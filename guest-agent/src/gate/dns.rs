//! Answers to programs' questions about names (RFC 1035), all of them from this guest: nothing is asked elsewhere, so
//! that no name leaves by a question.

use std::net::{Ipv4Addr, Ipv6Addr};

use simple_dns::rdata::{A, AAAA, RData};
use simple_dns::{CLASS, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, RCODE, ResourceRecord, TYPE};

/// Longest question, in bytes: a name of the longest length, and what resolvers put beside it.
pub const MAX_QUESTION_BYTES: usize = 1232;

/// Bytes of a question's header (RFC 1035 §4.1.1).
const HEADER_BYTES: usize = 12;

/// How long programs may keep an answer, in seconds: the rules may change.
const TTL_SECONDS: u32 = 5;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address, where it has one.
    pub v6: Option<Ipv6Addr>,
}

/// The answer to a question: `None` where the bytes are none. `lookup` gives a name, in lower case, its addresses; without
/// room for another name it gives none.
#[must_use]
pub fn answer(question: &[u8], lookup: impl FnOnce(&str) -> Option<Addresses>) -> Option<Vec<u8>> {
    if question.len() > MAX_QUESTION_BYTES {
        return None;
    }
    let Ok(asked) = Packet::parse(question) else {
        return refusal(question);
    };
    if asked.has_flags(PacketFlag::RESPONSE) {
        return None;
    }
    let mut reply = Packet::new_reply(asked.id());
    reply.set_flags(PacketFlag::RECURSION_AVAILABLE);
    if asked.has_flags(PacketFlag::RECURSION_DESIRED) {
        reply.set_flags(PacketFlag::RECURSION_DESIRED);
    }
    let [one] = asked.questions.as_slice() else {
        *reply.rcode_mut() = RCODE::FormatError;
        return reply.build_bytes_vec().ok();
    };
    reply.questions.push(one.clone());
    let is_internet = matches!(one.qclass, QCLASS::CLASS(CLASS::IN) | QCLASS::ANY);
    if asked.opcode() != OPCODE::StandardQuery || !is_internet {
        *reply.rcode_mut() = RCODE::NotImplemented;
        return reply.build_bytes_vec().ok();
    }
    // A dot inside a label would be another name's.
    let has_dots = one.qname.as_bytes().any(|label| label.contains(&b'.'));
    let name = one.qname.to_string().to_ascii_lowercase();
    if has_dots || name.is_empty() || name.ends_with(".arpa") {
        *reply.rcode_mut() = RCODE::NameError;
        return reply.build_bytes_vec().ok();
    }
    let Some(addresses) = lookup(&name) else {
        *reply.rcode_mut() = RCODE::ServerFailure;
        return reply.build_bytes_vec().ok();
    };
    // Every name is there, and has no records but these: in particular none that tell of HTTP/3 or of hidden hellos.
    let data = match one.qtype {
        QTYPE::TYPE(TYPE::A) | QTYPE::ANY => Some(RData::A(A::from(addresses.v4))),
        QTYPE::TYPE(TYPE::AAAA) => addresses.v6.map(|v6| RData::AAAA(AAAA::from(v6))),
        _ => None,
    };
    reply.answers.extend(
        data.map(|data| ResourceRecord::new(one.qname.clone(), CLASS::IN, TTL_SECONDS, data)),
    );
    reply.build_bytes_vec_compressed().ok()
}

/// The answer to a question that can't be read, so that whoever asks does not wait: its number, and an error.
fn refusal(question: &[u8]) -> Option<Vec<u8>> {
    let (id, rest) = question.split_first_chunk::<2>()?;
    // The first bit behind the number tells answers from questions (RFC 1035 §4.1.1).
    let is_question = rest.first()? & 0x80 == 0;
    if !is_question || question.len() < HEADER_BYTES {
        return None;
    }
    let mut reply = Packet::new_reply(u16::from_be_bytes(*id));
    *reply.rcode_mut() = RCODE::NotImplemented;
    reply.build_bytes_vec().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use simple_dns::{Name, Question};

    use super::*;

    const FOUND: Addresses = Addresses {
        v4: Ipv4Addr::new(198, 18, 1, 7),
        v6: Some(Ipv6Addr::new(0xfd73, 0, 0, 0, 0, 0, 0, 7)),
    };

    fn question(name: &str, kind: QTYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(0x1234);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = Name::new_unchecked(name).into_owned();
        packet
            .questions
            .push(Question::new(name, kind, QCLASS::CLASS(CLASS::IN), false));
        packet.build_bytes_vec().unwrap()
    }

    fn records(name: &str, kind: QTYPE) -> (RCODE, Vec<RData<'static>>) {
        let bytes = answer(&question(name, kind), |asked| {
            assert_eq!(asked, name.to_ascii_lowercase());
            Some(FOUND)
        })
        .unwrap();
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!(packet.id(), 0x1234);
        assert!(packet.has_flags(PacketFlag::RESPONSE | PacketFlag::RECURSION_AVAILABLE));
        let answers = packet.answers.iter();
        (
            packet.rcode(),
            answers.map(|one| one.rdata.clone().into_owned()).collect(),
        )
    }

    #[test]
    fn a_name_has_one_address_of_each_family() {
        let (code, found) = records("PyPI.org", QTYPE::TYPE(TYPE::A));
        assert_eq!(
            (code, found),
            (RCODE::NoError, vec![RData::A(A::from(FOUND.v4))])
        );
        let (_, found) = records("pypi.org", QTYPE::TYPE(TYPE::AAAA));
        assert_eq!(found, vec![RData::AAAA(AAAA::from(FOUND.v6.unwrap()))]);
    }

    #[test]
    fn other_records_there_are_none() {
        for kind in [
            TYPE::TXT,
            TYPE::MX,
            TYPE::SRV,
            TYPE::NULL,
            TYPE::CNAME,
            TYPE::HTTPS,
            TYPE::NS,
        ] {
            assert_eq!(
                records("pypi.org", QTYPE::TYPE(kind)),
                (RCODE::NoError, Vec::new()),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn addresses_have_no_names_and_there_may_be_no_room() {
        let bytes = answer(
            &question("4.3.2.1.in-addr.arpa", QTYPE::TYPE(TYPE::PTR)),
            |_| None,
        )
        .unwrap();
        assert_eq!(Packet::parse(&bytes).unwrap().rcode(), RCODE::NameError);
        let bytes = answer(&question("a.example", QTYPE::TYPE(TYPE::A)), |_| None).unwrap();
        assert_eq!(Packet::parse(&bytes).unwrap().rcode(), RCODE::ServerFailure);
    }

    #[test]
    fn questions_of_every_type_are_answered() {
        let mut bytes = question("a.example", QTYPE::TYPE(TYPE::A));
        let at = bytes.len() - 4;
        for kind in 0..=u16::MAX {
            bytes[at..at + 2].copy_from_slice(&kind.to_be_bytes());
            let reply = answer(&bytes, |_| Some(FOUND)).unwrap();
            assert_eq!(reply[..2], [0x12, 0x34]);
            let has_records = reply[6..8] != [0, 0];
            assert_eq!(has_records, [1, 28, 255].contains(&kind), "{kind}");
        }
    }

    #[test]
    fn answers_and_garbage_are_not_answered() {
        let reply = Packet::new_reply(1).build_bytes_vec().unwrap();
        assert_eq!(answer(&reply, |_| Some(FOUND)), None);
        assert_eq!(answer(&[0; 5], |_| Some(FOUND)), None);
        assert_eq!(answer(&[0; 2000], |_| Some(FOUND)), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(reply) = answer(&bytes, |_| Some(FOUND)) {
                prop_assert!(reply.len() <= 1024);
            }
        }
    }
}
