//! Goal: a query over several ranks and groups hits exactly what a restore could use. Method: every
//! subset of the pages of small namespaces against the definition of each dependency, written out.

use orbitkv_manager::core::{CoreConfig, CoreRefusal, RegionKind};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::{RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{QueryMode, Status};
use orbitkv_tests::rig::{PAGE, generous};
use orbitkv_tests::world::{World, chain, device, pages, spec};

const LEN: usize = 5;

struct Group {
    dependency: DependencySpec,
    region: RegionId,
}

/// A session with one namespace a dependency and the set of all.
fn groups(world: &mut World, dependencies: &[DependencySpec]) -> (SessionId, ScopeId, Vec<Group>) {
    let session = world.attach(1);
    let mut scopes = Vec::new();
    let mut groups = Vec::new();
    for (group, &dependency) in dependencies.iter().enumerate() {
        let spec = NamespaceSpec { group: group as u32, dependency, ..spec("hybrid", PAGE) };
        let scope = world.namespace(session, &spec);
        scopes.push(scope);
        groups.push(Group { dependency, region: world.region(session, scope, 64) });
    }
    let set = world.set(session, &scopes);
    (session, set, groups)
}

/// Whether a restore may end after `len` pages of which `there` are stored.
fn may_end(dependency: DependencySpec, len: usize, there: u32) -> bool {
    let needed = match dependency {
        DependencySpec::Chain => 0..len,
        DependencySpec::Window(pages) => len.saturating_sub(pages as usize)..len,
        DependencySpec::State => len.saturating_sub(1)..len,
    };
    needed.into_iter().all(|at| there & 1 << at != 0)
}

#[test]
fn every_subset_of_pages_gives_the_longest_restorable_length() {
    use DependencySpec::{Chain, State, Window};
    let sets: [&[DependencySpec]; 6] = [
        &[Window(2)],
        &[State],
        &[Chain, Window(2)],
        &[Chain, State],
        &[Window(1), Window(3)],
        &[Chain, Window(2), State],
    ];
    let whole = chain(1, LEN);
    for dependencies in sets {
        let mut rng = fastrand::Rng::with_seed(dependencies.len() as u64);
        for round in 0..150 {
            let mut world = World::new(generous(64 * PAGE), &[]);
            world.check_every = 0;
            let (session, set, groups) = groups(&mut world, dependencies);
            let mut masks = Vec::new();
            for group in &groups {
                // A chain has a prefix, the others any subset.
                let mask = match group.dependency {
                    Chain => (1_u32 << rng.u32(..=LEN as u32)) - 1,
                    _ if groups.len() == 1 => round % (1 << LEN),
                    _ => rng.u32(..1 << LEN),
                };
                let stored: Vec<_> =
                    (0..LEN).filter(|at| mask & 1 << at != 0).map(|at| whole[at]).collect();
                world.save(session, group.region, &pages(&stored));
                masks.push(mask);
            }
            world.settle();
            let ends = |len: usize| {
                groups.iter().zip(&masks).all(|(g, &mask)| may_end(g.dependency, len, mask))
            };
            let longest = (0..=LEN).rev().find(|&len| ends(len)).expect("0 always ends");
            let query = world.query(session, set, QueryMode::Demand, &pages(&whole));
            let ended = world.ended(session, query);
            assert_eq!(ended.completion.pages as usize, longest, "{dependencies:?} {masks:?}");
            for (at, result) in ended.results.iter().enumerate() {
                let expected = at < longest && ends(at + 1);
                assert_eq!(result.restorable, u16::from(expected), "{dependencies:?} at {at}");
            }
            world.core.check_laws();
        }
    }
}

#[test]
fn restorable_lengths_are_told_when_pages_come_from_ssd_too() {
    let devices = [orbitkv_tests::world::device(1, 64 * 2 * PAGE)];
    let mut world = World::new(generous(64 * PAGE), &devices);
    let dependencies = [DependencySpec::Chain, DependencySpec::State];
    let (session, set, groups) = groups(&mut world, &dependencies);
    let whole = chain(1, LEN);
    world.save(session, groups[0].region, &pages(&whole));
    world.save(session, groups[1].region, &pages(&[whole[1], whole[3]]));
    world.settle();
    let ask = |world: &mut World| {
        let query = world.query(session, set, QueryMode::Demand, &pages(&whole));
        world.settle();
        let ended = world.ended(session, query);
        ended.results.iter().map(|result| result.restorable).collect::<Vec<_>>()
    };
    let from_dram = ask(&mut world);
    assert_eq!(from_dram, [0, 1, 0, 1, 0]);
    world.advance(world.config().lease_ttl_ns);
    world.evict_dram();
    assert_eq!(ask(&mut world), from_dram);
}

#[test]
fn a_window_lease_pins_and_restores_only_the_window() {
    let mut world = World::new(generous(64 * PAGE), &[]);
    let dependencies = [DependencySpec::Chain, DependencySpec::Window(2), DependencySpec::State];
    let (session, set, groups) = groups(&mut world, &dependencies);
    let whole = chain(1, LEN);
    for group in &groups {
        world.save(session, group.region, &pages(&whole));
    }
    world.settle();
    let query = world.query(session, set, QueryMode::Demand, &pages(&whole));
    let found = world.ended(session, query).completion;
    assert_eq!((found.pages as usize, found.bytes), (LEN, (5 + 2 + 1) * PAGE));
    let lease = found.lease.expect("a lease");
    // Positions are those of the query, whatever the part begins with.
    for (group, first) in groups.iter().zip([0, 3, 4]) {
        let before = first > 0;
        if before {
            let early = world.restore(session, group.region, lease, 0, &pages(&whole[..1]), false);
            assert_eq!(world.ended(session, early).completion.status, Status::Error);
        }
        let part = pages(&whole[first as usize..]);
        let restore = world.restore(session, group.region, lease, first, &part, false);
        world.settle();
        assert_eq!(world.ended(session, restore).completion.status, Status::Ok);
    }
    assert_eq!(world.core.gauges().leases, 0);
}

#[test]
fn sets_are_checked_when_they_are_named() {
    let mut world = World::new(generous(64 * PAGE), &[]);
    let session = world.attach(1);
    let one = world.namespace(session, &spec("one", PAGE));
    let two = world.namespace(session, &spec("two", PAGE));
    let set = world.set(session, &[one, two]);
    let core = &mut world.core;
    for wrong in [&[][..], &[one, one], &[set], &[one, set], &[ScopeId(99)], &[one; 65]] {
        assert!(core.define_set(session, wrong).is_err(), "{wrong:?}");
    }
    assert!(core.register_region(session, set, 4, RegionKind::Host).is_err());
    assert!(core.register_region(session, one, 0, RegionKind::Host).is_err());
    assert!(core.define_set(SessionId(99), &[one]).is_err());
    world.close(session);
    assert!(world.core.define_namespace(session, &spec("three", PAGE)).is_err());
}

/// Windows wider than the range, over as many pages as a request may name.
#[test]
fn a_gap_at_the_end_of_a_wide_window_costs_its_page_only() {
    const PAGES: usize = 16_384;
    let mut world = World::new(generous(3 * PAGES as u64 * PAGE), &[]);
    world.check_every = 0;
    let session = world.attach_with(1, 2, 65_536);
    let whole = chain(1, PAGES);
    let mut scopes = Vec::new();
    for (group, gap) in [PAGES, PAGES - 1].into_iter().enumerate() {
        let dependency = DependencySpec::Window(20_000);
        let spec = NamespaceSpec { group: group as u32, dependency, ..spec("wide", PAGE) };
        let scope = world.namespace(session, &spec);
        let region = world.region(session, scope, PAGES as u32);
        let save = world.save(session, region, &pages(&whole[..gap]));
        world.settle();
        assert_eq!(world.ended(session, save).completion.pages as usize, gap);
        scopes.push(scope);
    }
    let set = world.set(session, &scopes);
    let query = world.query(session, set, QueryMode::Candidate, &pages(&whole));
    assert_eq!(world.ended(session, query).completion.pages as usize, PAGES - 1);
}

/// The table of namespaces is bounded, and what nobody uses makes room: else one client that comes
/// and goes would shut everybody out.
#[test]
fn a_namespace_that_nothing_refers_to_makes_room() {
    let config = CoreConfig { namespaces_max: 3, ..generous(16 * PAGE) };
    let mut world = World::new(config, &[]);
    let names = |world: &mut World, session, model: &str| {
        world.core.define_namespace(session, &spec(model, PAGE)).map(|(scope, _)| scope)
    };
    let first = world.attach(1);
    let scope = world.namespace(first, &spec("kept", PAGE));
    let region = world.region(first, scope, 16);
    let hashes = chain(1, 4);
    world.save(first, region, &pages(&hashes));
    world.settle();
    names(&mut world, first, "unused").expect("room");
    let second = world.attach(2);
    names(&mut world, second, "named").expect("room");
    let full = CoreRefusal::LimitReached { what: "namespace", limit: 3 };
    assert_eq!(names(&mut world, second, "more"), Err(full));
    names(&mut world, second, "kept").expect("it is known");
    // Its pages keep one, the second session another.
    world.close(first);
    let holder = world.attach(3);
    world.namespace(holder, &spec("more", PAGE));
    assert_eq!(names(&mut world, second, "again"), Err(full));
    world.close(second);
    let third = world.attach(4);
    names(&mut world, third, "again").expect("the second session is gone");
    assert_eq!(names(&mut world, third, "too many"), Err(full), "pages of the first are there");
    world.evict_dram();
    let other = SessionId(third.0 + 1);
    assert_eq!(world.attach(5), other);
    let late = world.namespace(other, &spec("late", PAGE));
    let query = world.query(other, late, QueryMode::Demand, &pages(&hashes));
    world.settle();
    assert_eq!(world.ended(other, query).completion.pages, 0, "another's pages are not its own");
    assert_eq!(world.core.gauges().namespaces, 3);
    world.core.check_laws();
}

/// Defines so many namespaces that nobody named before, each with a page.
fn fill_namespaces(world: &mut World, session: SessionId, name: &str, count: usize) {
    for number in 0..count {
        let scope = world.namespace(session, &spec(&format!("{name} {number}"), PAGE));
        let region = world.region(session, scope, 1);
        let save = world.save(session, region, &pages(&chain(1, 1)));
        world.settle();
        assert_eq!(world.ended(session, save).completion.pages, 1);
    }
}

/// Goal: one user cannot fill the table of namespaces, also not with pages that stay when he is gone,
/// nor over a restart. Method: a table of 64, of which 8 are kept for users with less than 4; a user
/// takes what he can, then others come.
#[test]
fn a_user_leaves_namespaces_to_others() {
    let config = CoreConfig { namespaces_max: 64, ..generous(128 * PAGE) };
    let mut world = World::new(config, &[device(1, 256 * PAGE)]);
    let define = |world: &mut World, session, model: &str| {
        world.core.define_namespace(session, &spec(model, PAGE)).map(|_| ())
    };
    let attach = |world: &mut World, uid| {
        world.uid = uid;
        world.attach(1)
    };
    let share =
        |uid, held| Err(CoreRefusal::NamespaceShare { uid, held, kept: 8, limit: 64, share: 4 });
    for life in 0..2 {
        let greedy = attach(&mut world, 1);
        if life == 0 {
            fill_namespaces(&mut world, greedy, "first", 56);
        } else {
            // Whose it was is not on SSD: he has his share once more.
            fill_namespaces(&mut world, greedy, "second", 4);
        }
        let held = [56, 4][life];
        assert_eq!(define(&mut world, greedy, "more"), share(1, held));
        assert_eq!(define(&mut world, greedy, "first 0"), Ok(()), "it is known");
        world.close(greedy);
        let again = attach(&mut world, 1);
        assert_eq!(define(&mut world, again, "more"), share(1, held + life), "their pages stay");
        let other = attach(&mut world, 2);
        for number in 0..4 {
            assert_eq!(define(&mut world, other, &format!("other {number}")), Ok(()));
        }
        let refused = if life == 0 {
            share(2, 4)
        } else {
            Err(CoreRefusal::LimitReached { what: "namespace", limit: 64 })
        };
        assert_eq!(define(&mut world, other, "other 4"), refused);
        // What nothing refers to makes room for all.
        world.close(other);
        let late = attach(&mut world, 2);
        assert_eq!(define(&mut world, late, "other 4"), Ok(()));
        world.core.check_laws();
        world = world.crash(|| true);
        assert_eq!(world.core.gauges().namespaces, 56);
    }
}
