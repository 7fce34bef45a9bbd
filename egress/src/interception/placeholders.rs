//! What placeholders in values of header fields become: the secrets of the connection's host, also within the Base64 of credentials.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use memchr::memmem;
use zeroize::Zeroizing;

use super::needle::Forms;
use crate::http::{HttpError, MAX_HEAD_BYTES};
use crate::secret::Secret;

/// Longest head with secrets in it, in bytes.
pub(super) const MAX_FILLED_BYTES: usize = MAX_HEAD_BYTES + (64 << 10);

/// The fields that hold credentials in Base64 (RFC 7617): a placeholder in there is found too.
const CREDENTIALS: [&str; 2] = ["authorization", "proxy-authorization"];
const BASIC: &[u8] = b"basic ";

/// Longest credentials that a placeholder is looked for in, in bytes: what is beside the secret is the guest's choice, and is kept.
const MAX_CREDENTIALS_BYTES: usize = 4 << 10;

/// The secrets of one connection's host.
pub(super) struct Placeholders {
    secrets: Vec<Arc<Secret>>,
    /// What must not come back is told there first.
    forms: Arc<Forms>,
}

impl fmt::Debug for Placeholders {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Placeholders")
            .field("secrets", &self.secrets)
            .finish_non_exhaustive()
    }
}

impl Placeholders {
    /// For these secrets. The credentials that one is put into are added to `forms`, before they are given out.
    pub(super) fn new(secrets: Vec<Arc<Secret>>, forms: &Arc<Forms>) -> Self {
        Self {
            secrets,
            forms: Arc::clone(forms),
        }
    }

    /// The value of a field with secrets in it, at most [`MAX_FILLED_BYTES`] long; `None` where it has no placeholder.
    /// The name's case makes no difference.
    ///
    /// # Errors
    /// [`HttpError::TooLong`], [`HttpError::CredentialsTooLong`], and [`HttpError::TooManySecrets`] where so many different credentials
    /// can't be looked for in what comes back.
    pub(super) fn fill(
        &self,
        name: &str,
        value: &[u8],
    ) -> Result<Option<Zeroizing<Vec<u8>>>, HttpError> {
        if let Some(value) = self.replace(value)? {
            return Ok(Some(value));
        }
        let holds_credentials = CREDENTIALS
            .iter()
            .any(|known| name.eq_ignore_ascii_case(known));
        let Some((scheme, encoded)) = value.split_at_checked(BASIC.len()) else {
            return Ok(None);
        };
        if !holds_credentials || !scheme.eq_ignore_ascii_case(BASIC) {
            return Ok(None);
        }
        let Ok(decoded) = STANDARD.decode(encoded.trim_ascii()) else {
            return Ok(None);
        };
        let Some(plain) = self.replace(&decoded)? else {
            return Ok(None);
        };
        if decoded.len() > MAX_CREDENTIALS_BYTES {
            return Err(HttpError::CredentialsTooLong(MAX_CREDENTIALS_BYTES));
        }
        let encoded = Zeroizing::new(STANDARD.encode(plain.as_slice()));
        // They may come back without what fills up their end.
        if !self.forms.add(encoded.trim_end_matches('=').as_bytes()) {
            return Err(HttpError::TooManySecrets);
        }
        Ok(Some(Zeroizing::new([scheme, encoded.as_bytes()].concat())))
    }

    /// Secrets for placeholders; `None` where there are none.
    fn replace(&self, text: &[u8]) -> Result<Option<Zeroizing<Vec<u8>>>, HttpError> {
        let mut replaced: Option<Zeroizing<Vec<u8>>> = None;
        for secret in &self.secrets {
            let text = replaced
                .as_ref()
                .map_or(text, |replaced| replaced.as_slice());
            let placeholder = secret.placeholder().as_bytes();
            let count = memmem::find_iter(text, placeholder).count();
            if count == 0 {
                continue;
            }
            let length = text.len() + count * secret.value().len();
            if length > MAX_FILLED_BYTES {
                return Err(HttpError::TooLong);
            }
            let mut next = Zeroizing::new(Vec::with_capacity(length));
            let mut rest = text;
            while let Some(at) = memmem::find(rest, placeholder) {
                next.extend_from_slice(rest.get(..at).unwrap_or_default());
                next.extend_from_slice(secret.value());
                rest = rest.get(at + placeholder.len()..).unwrap_or_default();
            }
            next.extend_from_slice(rest);
            replaced = Some(next);
        }
        Ok(replaced)
    }
}

#[cfg(test)]
mod tests {
    use super::super::mask::Masks;
    use super::*;

    const VALUE: &str = "s3cr3t-value";

    struct Case {
        placeholders: Placeholders,
        secret: Arc<Secret>,
        forms: Arc<Forms>,
    }

    impl Case {
        fn new() -> Self {
            let secret = Secret::new("TOKEN", &["a.example"], VALUE.as_bytes().to_vec()).unwrap();
            let (secret, forms) = (Arc::new(secret), Arc::default());
            Self {
                placeholders: Placeholders::new(vec![Arc::clone(&secret)], &forms),
                secret,
                forms,
            }
        }

        /// A field, with `{}` for the placeholder, as it goes on.
        fn filled(&self, name: &str, value: &str) -> Option<String> {
            let value = value.replace("{}", self.secret.placeholder());
            let filled = self.placeholders.fill(name, value.as_bytes()).unwrap();
            filled.map(|filled| String::from_utf8(filled.to_vec()).unwrap())
        }

        /// `Basic`, with `{}` in the credentials for the placeholder.
        fn basic(&self, credentials: &str) -> String {
            let credentials = credentials.replace("{}", self.secret.placeholder());
            format!("Basic {}", STANDARD.encode(credentials))
        }

        /// What comes back of an answer.
        fn masked(&self, answer: &str) -> String {
            let (mut back, mut masks) = (Vec::new(), Masks::new([], &self.forms));
            masks.take(answer.as_bytes(), 0, &mut back);
            masks.end(&mut back);
            String::from_utf8(back).unwrap()
        }
    }

    #[test]
    fn basic_credentials_are_looked_into_and_masked_with_and_without_their_filling() {
        // Of each length of what stands in front, and so with each filling.
        for user in ["", "m", "me", "you"] {
            let case = Case::new();
            let expected = STANDARD.encode(format!("{user}:{VALUE}:{VALUE}"));
            for name in ["Authorization", "PROXY-authorization"] {
                let value = case.basic(&format!("{user}:{{}}:{{}}"));
                let filled = case.filled(name, &value).unwrap();
                assert_eq!(filled, format!("Basic {expected}"), "{user}");
            }

            let bare = expected.trim_end_matches('=');
            for back in [&expected, bare] {
                let masked = case.masked(&format!("[{back}]"));
                assert!(
                    masked.bytes().all(|byte| b"[]*=".contains(&byte)),
                    "{masked}"
                );
            }
        }
    }

    #[test]
    fn credentials_alone_are_looked_into() {
        let case = Case::new();
        let basic = case.basic("me:{}");
        for (name, value) in [
            ("X-Key", basic.clone()),
            ("Cookie", basic.clone()),
            ("Authorization", basic.replacen("Basic", "Bearer", 1)),
            ("Authorization", basic.replacen("Basic ", "", 1)),
            ("Authorization", format!("{basic}!")),
            ("Authorization", case.basic("me:other")),
        ] {
            assert_eq!(case.filled(name, &value), None, "{name}: {value}");
        }
        assert_eq!(case.filled("X-Key", "a {} b"), Some(format!("a {VALUE} b")));
    }

    #[test]
    fn credentials_without_end_are_refused() {
        let case = Case::new();
        let fill = |number: usize| {
            let value = case.basic(&format!("{number}:{{}}"));
            let filled = case.placeholders.fill("Authorization", value.as_bytes());
            filled.map(|filled| filled.is_some())
        };
        let end = (0..200).map(fill).find(Result::is_err);
        assert_eq!(end, Some(Err(HttpError::TooManySecrets)));
        // Those that are known go on being good.
        assert_eq!(fill(1), Ok(true));
    }

    #[test]
    fn credentials_are_no_longer_than_their_bound_beside_a_secret() {
        let case = Case::new();
        let fill = |user: usize| {
            let value = case.basic(&format!("{}:{{}}", "u".repeat(user)));
            let filled = case.placeholders.fill("Authorization", value.as_bytes());
            filled.map(|filled| filled.is_some())
        };
        assert_eq!(fill(MAX_CREDENTIALS_BYTES / 2), Ok(true));
        assert_eq!(
            fill(MAX_CREDENTIALS_BYTES),
            Err(HttpError::CredentialsTooLong(MAX_CREDENTIALS_BYTES))
        );
    }
}
