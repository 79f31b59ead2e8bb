//! Namespaces: identities of bytes, and the scopes through which sessions name them.

use std::collections::HashMap;

use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NAMESPACE_TEXT_MAX, NamespaceSpec};
use sha2::{Digest, Sha256};

use super::replacement::{ListKind, Recency};

/// A namespace's place in the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct NamespaceId(pub(super) u32);

/// SHA-256 over every field of a [`NamespaceSpec`].
pub type NamespaceFingerprint = [u8; 32];

/// One namespace.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) fingerprint: NamespaceFingerprint,
    /// `None` for pages found on SSD whose engine has not come back yet.
    pub(super) dependency: Option<DependencySpec>,
    pub(super) image_bytes: u32,
    /// Short text for inspection.
    pub(super) label: String,
    /// Every indexed page of it that can be found: children hotter than their parents.
    pub(super) pages: Recency,
    /// Indexed pages that were forgotten and wait to be dropped, in the same order.
    pub(super) doomed: Recency,
    pub(super) dram_pages: u64,
    pub(super) ssd_pages: u64,
    /// How often it was forgotten: the era of its findable pages. What a save began to copy before
    /// that is not committed after.
    pub(super) forgets: u32,
    /// Scopes of attached sessions that name it.
    pub(super) scopes: u32,
    /// The user who named it first. `None` when it was found on SSD and nobody has named it since, and
    /// for a place that was given up.
    pub(super) owner: Option<u32>,
}

/// All namespaces of this epoch.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    table: Vec<Namespace>,
    current: HashMap<NamespaceFingerprint, NamespaceId>,
    /// Places that were given up.
    free: Vec<NamespaceId>,
    /// Where the search for a place to give up goes on.
    hand: usize,
}

/// What is wrong with a [`NamespaceSpec`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SpecFault {
    TextTooLong,
    ZeroTokens,
    RankOutOfRange,
    EmptyWindow,
}

impl Namespaces {
    pub(super) fn get(&self, id: NamespaceId) -> &Namespace {
        &self.table[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: NamespaceId) -> &mut Namespace {
        &mut self.table[id.0 as usize]
    }

    pub(super) fn find(&self, fingerprint: &NamespaceFingerprint) -> Option<NamespaceId> {
        self.current.get(fingerprint).copied()
    }

    /// Namespaces that can be named.
    pub(super) fn len(&self) -> usize {
        self.current.len()
    }

    /// Namespaces that a user named first.
    pub(super) fn held_by(&self, uid: u32) -> usize {
        self.table.iter().filter(|namespace| namespace.owner == Some(uid)).count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.table.iter()
    }

    /// Every namespace with its number. For checks.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (NamespaceId, &Namespace)> {
        let numbered = self.table.iter().enumerate();
        numbered.map(|(index, namespace)| (NamespaceId(index as u32), namespace))
    }

    /// The namespace with this identity, made when it is new.
    pub(super) fn intern(
        &mut self,
        fingerprint: NamespaceFingerprint,
        dependency: Option<DependencySpec>,
        image_bytes: u32,
        label: String,
    ) -> NamespaceId {
        if let Some(&id) = self.current.get(&fingerprint) {
            let namespace = self.get_mut(id);
            if namespace.dependency.is_none() {
                namespace.dependency = dependency;
                namespace.label = label;
            }
            return id;
        }
        let free = self.free.pop();
        let id = free.unwrap_or(NamespaceId(self.table.len() as u32));
        let namespace = Namespace {
            fingerprint,
            dependency,
            image_bytes,
            label,
            pages: Recency::new(ListKind::Namespace),
            doomed: Recency::new(ListKind::Namespace),
            dram_pages: 0,
            ssd_pages: 0,
            // What is remembered of the one before, by place and era, is none of its own.
            forgets: free.map_or(0, |id| self.get(id).forgets.wrapping_add(1)),
            scopes: 0,
            owner: None,
        };
        match free {
            Some(id) => *self.get_mut(id) = namespace,
            None => self.table.push(namespace),
        }
        self.current.insert(fingerprint, id);
        id
    }

    /// Gives the place of a namespace that `unused` accepts up, so that the next new one has it.
    /// False when there is none.
    pub(super) fn give_up_one(&mut self, unused: impl Fn(NamespaceId, &Namespace) -> bool) -> bool {
        let all = self.table.len();
        let mut places = (0..all).map(|at| (self.hand + at) % all);
        let found = places.find(|&at| unused(NamespaceId(at as u32), &self.table[at]));
        let Some(at) = found else { return false };
        self.hand = at + 1;
        self.current.remove(&self.table[at].fingerprint);
        self.table[at].owner = None;
        self.free.push(NamespaceId(at as u32));
        true
    }
}

/// Checks the fields that no larger pool could make valid.
pub(super) fn check_spec(spec: &NamespaceSpec) -> Result<(), SpecFault> {
    let texts = [&spec.model, &spec.dtype, &spec.layout, &spec.adapter, &spec.salt];
    if texts.iter().any(|text| text.len() > NAMESPACE_TEXT_MAX) {
        return Err(SpecFault::TextTooLong);
    }
    if spec.page_tokens == 0 {
        return Err(SpecFault::ZeroTokens);
    }
    if spec.tp_rank >= spec.tp_size || spec.pp_rank >= spec.pp_size {
        return Err(SpecFault::RankOutOfRange);
    }
    if spec.dependency == DependencySpec::Window(0) {
        return Err(SpecFault::EmptyWindow);
    }
    Ok(())
}

/// Identity of the bytes: every field, each with its length, in declaration order.
pub fn namespace_fingerprint(spec: &NamespaceSpec) -> NamespaceFingerprint {
    let mut hasher = Sha256::new();
    hasher.update(b"orbitkv namespace 1");
    for text in [&spec.model, &spec.dtype, &spec.layout, &spec.adapter, &spec.salt] {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    let (kind, window) = match spec.dependency {
        DependencySpec::Chain => (0_u64, 0),
        DependencySpec::Window(pages) => (1, pages),
        DependencySpec::State => (2, 0),
    };
    let numbers = [spec.page_tokens, spec.group, spec.tp_rank, spec.tp_size];
    let more = [spec.pp_rank, spec.pp_size, window];
    for number in numbers.into_iter().chain(more) {
        hasher.update(number.to_le_bytes());
    }
    hasher.update(spec.page_bytes.to_le_bytes());
    hasher.update(kind.to_le_bytes());
    hasher.finalize().into()
}

/// Text that inspection shows for a namespace: model, rank and group, never the salt itself.
pub(super) fn namespace_label(spec: &NamespaceSpec) -> String {
    let mut label = format!(
        "{} {} tp{}/{} pp{}/{} g{}",
        spec.model, spec.dtype, spec.tp_rank, spec.tp_size, spec.pp_rank, spec.pp_size, spec.group
    );
    if !spec.adapter.is_empty() {
        label.push_str(" adapter");
    }
    if !spec.salt.is_empty() {
        label.push_str(" salted");
    }
    label.chars().filter(|c| !c.is_control()).take(120).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> NamespaceSpec {
        NamespaceSpec {
            model: "m".into(),
            dtype: "bfloat16".into(),
            page_tokens: 64,
            page_bytes: 4096,
            layout: "bl".into(),
            group: 0,
            tp_rank: 0,
            tp_size: 2,
            pp_rank: 0,
            pp_size: 1,
            adapter: String::new(),
            salt: String::new(),
            dependency: DependencySpec::Chain,
        }
    }

    #[test]
    fn every_field_is_part_of_the_identity() {
        let base = spec();
        let variants = [
            NamespaceSpec { model: "n".into(), ..spec() },
            NamespaceSpec { dtype: "float8".into(), ..spec() },
            NamespaceSpec { page_tokens: 16, ..spec() },
            NamespaceSpec { page_bytes: 8192, ..spec() },
            NamespaceSpec { layout: "lb".into(), ..spec() },
            NamespaceSpec { group: 1, ..spec() },
            NamespaceSpec { tp_rank: 1, ..spec() },
            NamespaceSpec { tp_size: 4, ..spec() },
            NamespaceSpec { pp_size: 2, ..spec() },
            NamespaceSpec { pp_rank: 1, ..spec() },
            NamespaceSpec { adapter: "a".into(), ..spec() },
            NamespaceSpec { salt: "a".into(), ..spec() },
            NamespaceSpec { dependency: DependencySpec::Window(3), ..spec() },
            NamespaceSpec { dependency: DependencySpec::Window(4), ..spec() },
            NamespaceSpec { dependency: DependencySpec::State, ..spec() },
        ];
        let mut seen = vec![namespace_fingerprint(&base)];
        for variant in &variants {
            let fingerprint = namespace_fingerprint(variant);
            assert!(!seen.contains(&fingerprint), "{variant:?}");
            seen.push(fingerprint);
        }
        assert_eq!(namespace_fingerprint(&spec()), seen[0]);
    }

    #[test]
    fn text_cannot_slide_from_one_field_into_the_next() {
        let one = NamespaceSpec { adapter: "ab".into(), salt: "c".into(), ..spec() };
        let other = NamespaceSpec { adapter: "a".into(), salt: "bc".into(), ..spec() };
        assert_ne!(namespace_fingerprint(&one), namespace_fingerprint(&other));
    }

    #[test]
    fn a_place_that_is_given_up_is_another_namespace_then() {
        let mut all = Namespaces::default();
        let ids: Vec<_> = (0..3)
            .map(|at| all.intern([at; 32], Some(DependencySpec::Chain), 4096, String::new()))
            .collect();
        assert!(!all.give_up_one(|_, _| false));
        assert!(all.give_up_one(|id, _| id == ids[1]));
        assert_eq!((all.len(), all.find(&[1; 32])), (2, None));
        let new = all.intern([9; 32], None, 8192, String::new());
        assert_eq!((new, all.len(), all.get(new).image_bytes), (ids[1], 3, 8192));
        assert_eq!(all.get(new).forgets, 1, "another era");
        let more = all.intern([10; 32], None, 4096, String::new());
        assert_eq!(more, NamespaceId(3));
    }

    #[test]
    fn one_identity_has_one_place() {
        let mut all = Namespaces::default();
        let print = namespace_fingerprint(&spec());
        let found_on_disk = all.intern(print, None, 4096, "x".into());
        let defined = all.intern(print, Some(DependencySpec::Chain), 4096, "y".into());
        assert_eq!(found_on_disk, defined);
        assert_eq!(all.get(defined).dependency, Some(DependencySpec::Chain));
        assert_eq!((all.len(), all.get(defined).label.as_str()), (1, "y"));
    }
}
