//! Tests of the state of a hook, given the programs and filters at it.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use mirror_core::hidden::Ahead;
use netlink_packet_core::DefaultNla;
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionOption, TcAttribute, TcFilterBpfOption, TcFilterMatchAllOption,
    TcFilterU32Option, TcMessage, TcOption,
};
use proptest::prelude::*;

use super::{filters::Filter, inside::View, survey::leave_out_siblings, tcx::InChain, *};
use crate::model::{HookState, NetnsId};

const CURRENT: u32 = 100;

fn in_chain(id: u32) -> InChain {
    InChain { id, name: format!("program{id}") }
}

/// An arbitrary hook: a link, programs of podmirror and of other software, filters.
fn hook() -> impl Strategy<Value = Attached> {
    let id = || prop_oneof![Just(CURRENT), 1..4u32];
    let filter = || id().prop_map(|program| Filter { priority: 1, program });
    let ahead = || {
        let program = (1..4u32).prop_map(|id| Ahead::Program { name: String::new(), id });
        prop::collection::vec(program, 0..2)
    };
    let pin = prop::option::of(Just(PathBuf::from("/v1/links/7-tap_ingress")));
    let chain = prop::collection::vec(id().prop_map(in_chain), 0..3);
    let filters = prop::collection::vec(filter(), 0..3);
    (pin, chain, filters, ahead(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(pin, chain, ours, ahead, lacks_hook, is_dead, is_untraced)| {
            let is_dead = is_dead && chain.iter().all(|program| program.id != CURRENT);
            let filters = AtHook { ours, ahead };
            Attached { pin, chain, filters, lacks_hook, is_dead, is_untraced, at_exit: Vec::new() }
        },
    )
}

fn methods() -> impl Strategy<Value = Method> {
    prop_oneof![Just(Method::Tcx), Just(Method::Clsact)]
}

proptest! {
    /// At a `Current` hook podmirror's program runs once: there is exactly one link or filter of podmirror, with this
    /// agent's program and maps.
    #[test]
    fn a_hook_is_current_only_where_one_thing_of_ours_stands(hook in hook(), method in methods()) {
        let things = usize::from(hook.pin.is_some()) + hook.filters.ours.len();
        match hook.state(method, Some(CURRENT)) {
            HookState::Absent => prop_assert!(things == 0 && !hook.is_dead),
            HookState::Unknown => prop_assert!(false, "it was read"),
            HookState::Dead => prop_assert!(hook.is_dead && hook.filters.ours.is_empty()),
            HookState::Stale => prop_assert!(things > 0),
            HookState::Current => {
                prop_assert_eq!(things, 1);
                prop_assert!(hook.filters.ours.iter().all(|filter| filter.program == CURRENT));
                prop_assert!(hook.filters.ours.is_empty() || !hook.is_untraced, "cleanup has to find it");
                let expected = if hook.pin.is_none() { Method::Clsact } else { Method::Tcx };
                prop_assert_eq!(method, expected);
            }
        }
        prop_assert_ne!(hook.state(method, None), HookState::Current);
    }

    /// Hidden packets are reported only for a hook with the current program.
    #[test]
    fn what_is_hidden_is_judged_where_the_hook_is_current(hook in hook(), method in methods()) {
        let hidden = hook.hidden(method, Some(CURRENT));
        if hook.lacks_hook {
            prop_assert_eq!(hidden, Some(Hidden::NoHook));
        } else if hook.state(method, Some(CURRENT)) != HookState::Current {
            prop_assert_eq!(hidden, None);
        } else {
            let others = hook.chain.iter().take_while(|program| program.id != CURRENT).count();
            prop_assert_eq!(hidden.is_some(), others + hook.filters.ahead.len() > 0);
        }
    }
}

#[test]
fn every_tcx_program_is_ahead_of_a_filter() {
    let ours = vec![Filter { priority: 1, program: CURRENT }];
    let filters = AtHook { ours, ahead: Vec::new() };
    let hook = Attached { chain: vec![in_chain(7)], filters, ..Attached::default() };
    let hidden = hook.hidden(Method::Clsact, Some(CURRENT));
    assert_eq!(hidden, Some(Hidden::Program("program7".into())));
}

#[test]
fn a_program_behind_ours_hides_nothing() {
    let chain = vec![in_chain(CURRENT), in_chain(7)];
    let hook = Attached { pin: Some("/pin".into()), chain, ..Attached::default() };
    assert_eq!(hook.state(Method::Tcx, Some(CURRENT)), HookState::Current);
    assert_eq!(hook.hidden(Method::Tcx, Some(CURRENT)), None);
}

/// A device that cannot be read does not affect the others: they are evaluated, and that device is tried again.
#[test]
fn a_device_that_cannot_be_read_fails_no_other() {
    let filters =
        AllFilters { unread: [(IfIndex(7), "no answer".to_owned())].into(), ..AllFilters::default() };
    let survey = Survey { filters, ..Survey::default() };
    let look = |ifindex| {
        survey.look(Device::on_node(IfIndex(ifindex)), Program::TapIngress, Method::Clsact, Some(CURRENT))
    };
    assert_eq!(look(7), (HookState::Unknown, None));
    assert_eq!(look(8), (HookState::Absent, None));
    assert!(!survey.has_no_filters());
}

/// The state inside a pod where a filter is removed or replaced while its attachment marker exists.
#[test]
fn a_filter_of_this_agent_that_is_not_there_any_more_was_removed() {
    let device = Device::in_pod(NetnsId { dev: 4, ino: 9 }, IfIndex(2));
    let hook = (device, Program::TapIngress);
    let ours = |program| AtHook { ours: vec![Filter { priority: 1, program }], ahead: Vec::new() };
    let look = |there: Option<u32>, has_trace: bool, attached: Option<bool>| {
        let mut view = View::default();
        view.filters.hooks.extend(there.map(|program| ((device.ifindex, hook.1), ours(program))));
        let survey = Survey {
            traces: has_trace.then_some(hook).into_iter().collect(),
            inside: [(device.netns, Ok(view))].into(),
            attached: attached.map(|attached| (hook, attached)).into_iter().collect(),
            ..Survey::default()
        };
        assert_eq!(survey.hooks().contains(&hook), has_trace);
        survey.look(device, hook.1, Method::Clsact, Some(CURRENT)).0
    };
    assert_eq!(look(Some(CURRENT), true, Some(true)), HookState::Current);
    assert_eq!(look(Some(CURRENT), false, Some(true)), HookState::Dead, "it is attached again, with a trace");
    assert_eq!(look(None, true, Some(true)), HookState::Dead);
    assert_eq!(look(None, true, None), HookState::Dead, "an earlier agent has attached it");
    assert_eq!(look(None, true, Some(false)), HookState::Stale, "this one could not");
    assert_eq!(look(Some(1), true, Some(true)), HookState::Dead, "another program has its place");
    assert_eq!(look(Some(1), true, None), HookState::Stale, "an earlier agent's");
    assert_eq!(look(None, false, None), HookState::Absent);
    // A namespace that cannot be read.
    let inside = [(device.netns, Err("no".to_owned()))].into();
    let survey = Survey { traces: [hook].into(), inside, ..Survey::default() };
    assert_eq!(survey.look(device, hook.1, Method::Clsact, Some(CURRENT)), (HookState::Unknown, None));
    // A device with too many filters, with a link or with a filter of podmirror.
    let mut view = View::default();
    view.filters.unread.insert(device.ifindex, "more than 1000".to_owned());
    for (traces, state) in [(Vec::new(), HookState::Absent), (vec![hook], HookState::Unknown)] {
        let (inside, traces) = ([(device.netns, Ok(view.clone()))].into(), traces.into_iter().collect());
        let survey = Survey { traces, inside, ..Survey::default() };
        assert_eq!(survey.look(device, hook.1, Method::Clsact, Some(CURRENT)), (state, None));
    }
}

/// `cleanup` does not create the directory.
#[test]
fn without_a_directory_no_program_is_ours() {
    let directory = tempfile::tempdir().unwrap();
    assert!(programs_of(&Pins::new(directory.path())).unwrap().is_empty());
}

/// A netlink message that lists a filter of this kind.
fn listed(handle: u32, protocol: u16, kind: &str, options: Vec<TcOption>) -> TcMessage {
    let mut message = TcMessage::default();
    message.header.handle = handle.into();
    message.header.info = 3 << 16 | u32::from(protocol.to_be());
    message.attributes =
        vec![TcAttribute::Kind(kind.into()), TcAttribute::Chain(0), TcAttribute::Options(options)];
    message
}

/// A gact action that ends with `action`.
fn gact(action: i32) -> TcAction {
    let mut parameters = vec![0; 20];
    parameters[8..12].copy_from_slice(&action.to_ne_bytes());
    let parameters = TcActionOption::Other(DefaultNla::new(2, parameters));
    let mut gact = TcAction::default();
    gact.attributes =
        vec![TcActionAttribute::Kind("gact".into()), TcActionAttribute::Options(vec![parameters])];
    gact
}

fn ours(program: u32) -> TcMessage {
    let options = [TcFilterBpfOption::ProgName("tap_ingress".into()), TcFilterBpfOption::ProgId(program)];
    listed(HANDLE.into(), 3, "bpf", options.map(TcOption::Bpf).to_vec())
}

#[test]
fn filters_are_read_as_they_are_listed() {
    const ALL: u16 = 3;
    const IPV4: u16 = 0x0800;
    let matchall = |action| vec![TcOption::MatchAll(TcFilterMatchAllOption::Action(vec![gact(action)]))];
    let in_hardware = vec![TcOption::MatchAll(TcFilterMatchAllOption::Flags(2))];
    let table = vec![TcOption::U32(TcFilterU32Option::Divisor(1))];
    let program = [TcFilterBpfOption::ProgName("cil".into()), TcFilterBpfOption::ProgId(9)];
    let filter =
        |is_for_all, goes_on| Ahead::Filter { kind: "matchall".into(), priority: 3, is_for_all, goes_on };
    let (accept, go_on) = (0, -1);
    for (message, expected) in [
        (listed(1, ALL, "matchall", matchall(accept)), Some(filter(true, false))),
        (listed(1, IPV4, "matchall", matchall(accept)), Some(filter(false, false))),
        (listed(1, ALL, "matchall", matchall(go_on)), Some(filter(true, true))),
        (listed(1, ALL, "matchall", vec![]), Some(filter(true, false))),
        (listed(1, ALL, "matchall", in_hardware), None),
        (listed(0, ALL, "matchall", vec![]), None),
        (listed(1, ALL, "u32", table), None),
        (
            listed(1, ALL, "bpf", program.map(TcOption::Bpf).to_vec()),
            Some(Ahead::Program { name: "cil".into(), id: 9 }),
        ),
    ] {
        let behind = listed(1, ALL, "flower", vec![]);
        let at_hook = filters::at_hook(&[message, ours(CURRENT), behind], Program::TapIngress);
        assert_eq!(at_hook.ours, [Filter { priority: 3, program: CURRENT }]);
        assert_eq!(at_hook.ahead, expected.into_iter().collect::<Vec<_>>());
    }
    // Without a filter of podmirror, nothing is ahead of it.
    let others = [listed(1, ALL, "matchall", vec![])];
    assert_eq!(filters::at_hook(&others, Program::TapIngress), AtHook::default());
}

/// A collector's device has a tap's program and the second stage at one hook. Programs of other software still count.
#[test]
fn our_other_program_at_a_hook_hides_nothing() {
    let named = |id: u32, name: &str| InChain { id, name: name.to_owned() };
    let all =
        || vec![named(1, "tap_ingress"), named(2, "tap_egress"), named(3, "deliver"), named(4, "theirs")];
    for (which, expected) in [
        (Program::TapIngress, vec![1, 2, 3, 4]),
        (Program::TapEgress, vec![1, 2, 4]),
        (Program::Deliver, vec![1, 3, 4]),
    ] {
        let ahead = all().into_iter().map(|InChain { id, name }| Ahead::Program { name, id }).collect();
        let (mut chain, mut filters) = (all(), AtHook { ours: Vec::new(), ahead });
        leave_out_siblings(which, &mut chain, &mut filters);
        assert_eq!(chain.iter().map(|program| program.id).collect::<Vec<_>>(), expected, "{which:?}");
        assert_eq!(filters.ahead.len(), expected.len(), "{which:?}");
    }
}
