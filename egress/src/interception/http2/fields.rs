//! Heads and trailers of HTTP/2: requests are checked as those of HTTP/1 are, and get secrets for placeholders; answers are masked.

use std::sync::Arc;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Request, Uri, request, uri};

use super::super::mask::Masks;
use super::super::needle::{Forms, Needle};
use super::super::placeholders::{MAX_FILLED_BYTES, Placeholders};
use super::super::requests::{IDENTITY, LEFT_OUT};
use crate::http::{HttpError, HttpGuard, MAX_FIELDS};
use crate::policy::Target;
use crate::secret::Secret;

/// What stands in a head alone: a server that takes a trailer for part of the head would see another request (RFC 9110 §6.5.1).
const HEAD_ALONE: [&str; 2] = ["host", "content-length"];

/// The requests of one connection.
#[derive(Debug)]
pub struct Requests {
    guard: HttpGuard,
    placeholders: Placeholders,
}

impl Requests {
    /// For a connection to this host, with its secrets.
    pub(in super::super) fn new(
        target: &Target,
        port: u16,
        secrets: Vec<Arc<Secret>>,
        forms: &Arc<Forms>,
    ) -> Self {
        Self {
            guard: HttpGuard::opened(target.clone(), port),
            placeholders: Placeholders::new(secrets, forms),
        }
    }

    /// For a connection to this host, for which there is no secret.
    #[must_use]
    pub fn without_secrets(target: Target, port: u16) -> Self {
        Self {
            guard: HttpGuard::opened(target, port),
            placeholders: Placeholders::new(Vec::new(), &Arc::default()),
        }
    }

    /// A request as it may go on, with secrets in it. HTTP/2 has no other lines, ends and lengths than its own, and what it forbids
    /// (RFC 9113 §8.2, §8.3) was refused before.
    ///
    /// # Errors
    /// See [`HttpError`].
    pub fn take(&self, head: &request::Parts) -> Result<Request<()>, HttpError> {
        self.guard.check_method(head.method.as_str())?;
        let fields = &head.headers;
        if fields.len() > MAX_FIELDS {
            return Err(HttpError::TooLong);
        }
        if fields.contains_key("http2-settings") {
            return Err(HttpError::Upgrade);
        }
        let uri = self.checked(&head.uri, head.method == http::Method::OPTIONS)?;
        let hosts: Vec<&HeaderValue> = fields.get_all("host").iter().collect();
        match hosts.as_slice() {
            [] => {}
            [host] => self.guard.check_authority(host.as_bytes())?,
            more => return Err(HttpError::HostCount(more.len())),
        }
        check_length(fields)?;
        let mut request = Request::new(());
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = uri;
        *request.version_mut() = http::Version::HTTP_2;
        *request.headers_mut() = self.filled(fields)?;
        Ok(request)
    }

    /// The target, whose authority is the host.
    fn checked(&self, target: &Uri, is_options: bool) -> Result<Uri, HttpError> {
        const NONE: HttpError = HttpError::Http2("a request without an authority");
        let authority = target.authority().ok_or(NONE)?;
        self.guard.check_authority(authority.as_str().as_bytes())?;
        if target.scheme() != Some(&uri::Scheme::HTTPS) {
            return Err(HttpError::Http2("a request's scheme is not https"));
        }
        let path = target.path();
        if !(path.starts_with('/') || path == "*" && is_options) {
            return Err(HttpError::Http2("a request's path is none"));
        }
        Ok(target.clone())
    }

    /// The fields that go on; Host is the authority's, which stands elsewhere.
    fn filled(&self, fields: &HeaderMap) -> Result<HeaderMap, HttpError> {
        let mut filled = HeaderMap::with_capacity(fields.len() + 1);
        let mut total = 0;
        for (name, value) in fields {
            // Of HTTP/2 it asks for trailers alone, which can be masked.
            let is_left_out = LEFT_OUT.contains(&name.as_str()) && name != "te";
            if is_left_out || name == "host" {
                continue;
            }
            if value.as_bytes().trim_ascii() != value.as_bytes() {
                return Err(HttpError::Http2("a field's value has a space at an end"));
            }
            let value = match self.placeholders.fill(name.as_str(), value.as_bytes())? {
                None => value.clone(),
                Some(secret) => {
                    let mut value = HeaderValue::from_bytes(&secret)
                        .map_err(|_| HttpError::Http2("a field's value is none"))?;
                    // Never in a table of HPACK, here or further on (RFC 7541 §7.1.3).
                    value.set_sensitive(true);
                    value
                }
            };
            total += name.as_str().len() + value.len();
            if total > MAX_FILLED_BYTES {
                return Err(HttpError::TooLong);
            }
            filled.append(name, value);
        }
        filled.insert(
            http::header::ACCEPT_ENCODING,
            HeaderValue::from_static(IDENTITY),
        );
        Ok(filled)
    }
}

/// One length at most, in digits.
fn check_length(fields: &HeaderMap) -> Result<(), HttpError> {
    let lengths: Vec<&HeaderValue> = fields.get_all("content-length").iter().collect();
    match lengths.as_slice() {
        [] => Ok(()),
        [length] if length.as_bytes().iter().all(u8::is_ascii_digit) && !length.is_empty() => {
            Ok(())
        }
        [_] => Err(HttpError::Length("Content-Length is no number")),
        _ => Err(HttpError::Length("more than one Content-Length")),
    }
}

/// A request's trailers, which go on as they are.
///
/// # Errors
/// [`HttpError::Http2`] for one that belongs in a head.
pub(super) fn trailers(found: HeaderMap) -> Result<HeaderMap, HttpError> {
    if HEAD_ALONE.iter().any(|name| found.contains_key(*name)) {
        return Err(HttpError::Http2("a trailer that belongs in a head"));
    }
    Ok(found)
}

/// What is looked for in the answers of one connection.
#[derive(Clone)]
pub(in super::super) struct Masking {
    needles: Vec<Arc<Needle>>,
    forms: Arc<Forms>,
}

impl Masking {
    pub(in super::super) fn new(needles: Vec<Arc<Needle>>, forms: &Arc<Forms>) -> Self {
        Self {
            needles,
            forms: Arc::clone(forms),
        }
    }

    /// For one text that comes in pieces.
    pub(super) fn masks(&self) -> Masks {
        Masks::new(self.needles.iter().cloned(), &self.forms)
    }

    /// Fields of a head, or trailers, with secrets in names and values masked.
    pub(super) fn fields(&self, found: HeaderMap) -> HeaderMap {
        let mut masks = self.masks();
        let mut masked = HeaderMap::with_capacity(found.len());
        let mut last = None;
        for (name, value) in found {
            // A name stands with the first of its values alone.
            if let Some(name) = name {
                let text = masks.whole(name.as_str().as_bytes());
                last = HeaderName::from_bytes(&text).ok();
            }
            let text = masks.whole(value.as_bytes());
            if let (Some(name), Ok(value)) = (&last, HeaderValue::from_bytes(&text)) {
                masked.append(name.clone(), value);
            }
        }
        masked
    }
}
