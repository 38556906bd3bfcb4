//! The node's route to an address: the device and the MTU.
//!
//! The kernel chooses the route, as for a packet that the node sends. `mirror_core::tunnel` evaluates it. `netlink`
//! calls this module.

use std::{io, net::IpAddr};

use netlink_packet_core::NetlinkPayload;
use rtnetlink::{
    Handle, RouteMessageBuilder,
    packet_route::{
        RouteNetlinkMessage,
        route::{RouteAttribute, RouteMetric, RouteType},
    },
};

use super::{is_momentary, socket::ask};
use crate::model::{IfIndex, Route};

/// Returns the route to an address, or the reason why there is none.
///
/// # Errors
///
/// The kernel could not answer at the moment.
pub(super) async fn to(handle: &Handle, remote: IpAddr) -> io::Result<Result<Route, String>> {
    match look_up(handle, remote).await {
        Ok(route) => Ok(route),
        Err(error) if is_momentary(&error) => Err(error),
        Err(error) => Ok(Err(error.to_string())),
    }
}

async fn look_up(handle: &Handle, remote: IpAddr) -> io::Result<Result<Route, String>> {
    let bits = if remote.is_ipv6() { 128 } else { 32 };
    let builder = RouteMessageBuilder::<IpAddr>::new();
    let question = builder.destination_prefix(remote, bits).map_err(io::Error::other)?.build();
    let replies = ask(handle, RouteNetlinkMessage::GetRoute(question), 0).await?;
    let route = replies.into_iter().find_map(|reply| {
        let NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) = reply.payload else {
            return None;
        };
        let (mut ifindex, mut mtu) = (None, None);
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Oif(index) => ifindex = Some(IfIndex(*index)),
                RouteAttribute::Metrics(metrics) => {
                    mtu = metrics.iter().find_map(|metric| match metric {
                        RouteMetric::Mtu(mtu) => Some(*mtu),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        let kind = route.header.kind;
        Some(match (kind, ifindex) {
            (RouteType::Unicast | RouteType::Local, Some(ifindex)) => {
                Ok(Route { ifindex, mtu, is_local: kind == RouteType::Local })
            }
            _ => Err(format!("the kernel's route is of the kind {kind:?}")),
        })
    });
    Ok(route.unwrap_or_else(|| Err("the kernel names no route".to_owned())))
}
